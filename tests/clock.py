"""Tests that watch the clock, on machines that may be busy with something else.

Many promises have a number: a dead process is named within two seconds. A busy machine may break
any such number once; a fault of the library breaks it every time. So what comes too late raises
`Late`, and conftest.py runs that test again from its start, three times in all. A wrong answer is
no lateness: it fails at once.
"""

from __future__ import annotations

import queue
import subprocess

TRIES = 3


class Late(AssertionError):
    """It came, but not in time; or has not come yet."""


#: how a test fails that has waited in vain
LATENESS = (Late, TimeoutError, queue.Empty, subprocess.TimeoutExpired)


def in_time(seconds: float, limit: float, least: float = 0.0) -> None:
    """It took less than the limit, and no less than it had to."""
    if not least <= seconds < limit:
        raise Late(f"it took {seconds:.2f} s instead of {least:g} to {limit:g}")


def unless_late(condition: object, why: object) -> None:
    """It holds wherever everybody got the time to do their part."""
    if not condition:
        raise Late(str(why))
