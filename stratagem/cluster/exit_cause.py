"""Under `stratagem run`, a task tells the launcher whether it took part in the job, and where it
ends because of another one, which.

A failing task notifies its peers before it ends, and they may end sooner: the order in which
processes end does not say which failed first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stratagem.errors import StratagemError

#: the path of a file to which the task writes the name of the one that failed
VARIABLE = "STRATAGEM_BLAME"

#: what the file beside it says: a task has made a strategy, and computes with the others
JOINED, COMPUTES = "joined", "computes"

_reason: BaseException | None = None
_said: Path | None = None


def at_exit(environ: Mapping[str, str]) -> None:
    """Write the cause when this process ends, if the launcher has set the variable."""
    if path := environ.get(VARIABLE):
        atexit.unregister(_write_cause)
        atexit.register(_write_cause, path, os.getpid())
        _say(part_of(path), JOINED)


def part_of(path: str | Path) -> Path:
    """The file that says which part a task took."""
    return Path(f"{path}.part")


def took_part() -> None:
    """Note that this task computes something together with others."""
    if _said is not None:
        _say(_said, COMPUTES)


def _say(file: Path, what: str) -> None:
    global _said
    _said = file if what == JOINED else None
    with contextlib.suppress(OSError):  # the launcher has gone, and its folder with it
        file.write_text(what)


def because(error: BaseException) -> None:
    """Record the error because of which this process ends, if it will be caught."""
    global _reason
    _reason = error


def _write_cause(path: str, owner: int) -> None:
    who = whom(_reason or getattr(sys, "last_value", None))
    if who and os.getpid() == owner:
        Path(path).write_text(who)


def whom(error: BaseException | None) -> str:
    """Return the task or replica that an error, or one of its causes, names; else ''."""
    while error is not None and not (isinstance(error, StratagemError) and error.who):
        error = error.__cause__ or error.__context__
    return "" if error is None else error.who
