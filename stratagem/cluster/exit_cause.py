"""Under `stratagem run`: a task that ends because of another leaves word of it for the launcher.

Whoever fails tells the others before it ends, and they may end sooner: the order in which
processes end does not say who failed first.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stratagem.errors import ReplicaError

#: names a file of the task's own, into which it writes whom it ended because of
VARIABLE = "STRATAGEM_BLAME"

_reason: BaseException | None = None


def at_exit(environ: Mapping[str, str]) -> None:
    """Leave word when this process ends, if a launcher has asked for it."""
    if path := environ.get(VARIABLE):
        atexit.unregister(_leave_word)
        atexit.register(_leave_word, path, os.getpid())


def because(error: BaseException) -> None:
    """This process ends because of that, though nobody will see it uncaught."""
    global _reason
    _reason = error


def _leave_word(path: str, owner: int) -> None:
    who = whom(_reason or getattr(sys, "last_value", None))
    if who and os.getpid() == owner:
        Path(path).write_text(who)


def whom(error: BaseException | None) -> str:
    """The task or replica that an uncaught error names, or one that it arose from; else nobody."""
    while error is not None and not isinstance(error, ReplicaError):
        error = error.__cause__ or error.__context__
    return "" if error is None else error.who
