"""Tests that watch the clock, on machines that may be busy with something else.

Many promises have a number: a dead process is named within two seconds. A busy machine may break
any such number once; a fault of the library breaks it every time. So what comes too late raises
`Late`, and conftest.py runs that test again from its start, three times in all, and names it at
the end of the run; `.ci/run` runs those once more, alone. Late there, too, it fails, unless the
machine itself was kept from running: a virtual machine whose processors are given to somebody else
says so. A wrong answer is no lateness: it fails at once, but for `.ci/run`, which prints it and
runs the test once more alone: wrong again, it fails; right then, it has a race that somebody has to
mend. A hang, where what a test waits for does not come at all, fails everywhere: `Hang`, a
TimeoutError of a socket or a future, an empty queue, a process that does not end, the test's own
time limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

TRIES = 3
#: how many times as long a hang is waited for: on machines that may be slow
SLOWER = float(os.environ.get("STRATAGEM_TEST_SLOWER", "1"))
#: seconds after which nobody waits any longer for what has not come
PATIENCE = 60.0 * SLOWER
#: the share of the time that this machine wanted and did not get, from which promises are void
TAKEN = 0.1


class Late(AssertionError):
    """It came, but not in time."""


class Hang(AssertionError):
    """It has not come at all; never tried again."""


def wait_for(condition: Callable[[], object], seconds: float = 30.0, what: str = "") -> float:
    """Wait until it holds; the seconds it took. It is late after `seconds`, and hangs if it never
    does."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        if waited > max(seconds, PATIENCE):
            raise Hang(f"waited {waited:.1f} s in vain {what}")
        time.sleep(0.02)
    took = time.monotonic() - start
    unless_late(took < seconds, f"waited {took:.1f} s {what}")
    return took


def in_time(seconds: float, limit: float, least: float = 0.0) -> None:
    """It took less than the limit, and no less than it had to."""
    if not least <= seconds < limit:
        raise Late(f"it took {seconds:.2f} s instead of {least:g} to {limit:g}")


def unless_late(condition: object, why: object) -> None:
    """It holds wherever everybody got the time to do their part."""
    if not condition:
        raise Late(str(why))


def processor_time() -> tuple[int, int]:
    """How much time the processors of this machine ran, and how much more they would have."""
    try:
        user, nice, system, _idle, _io, irq, softirq, stolen = map(
            int, Path("/proc/stat").read_text().split()[1:9]
        )
    except FileNotFoundError:  # not Linux
        return 0, 0
    return user + nice + system + irq + softirq, stolen


def share_taken(since: tuple[int, int]) -> float:
    """Which part of the time that this machine wanted since then was given to somebody else."""
    ran, stolen = (now - then for now, then in zip(processor_time(), since, strict=True))
    return stolen / max(1, ran + stolen)
