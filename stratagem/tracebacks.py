"""Tracebacks of users' scripts, without the frames of this package.

`STRATAGEM_TRACEBACK=1`, or `stratagem run --traceback`, shows everything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from traceback import FrameSummary, TracebackException
from types import TracebackType

from stratagem.errors import ReplicaError, StratagemError

VARIABLE = "STRATAGEM_TRACEBACK"
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def described(error: BaseException) -> str:
    """The traceback of an error, without the frames of this package that led to it."""
    whole = TracebackException.from_exception(error)
    if not os.environ.get(VARIABLE):
        _shorten(whole, error)
    return "".join(whole.format())


def for_other_tasks(error: BaseException) -> tuple[str, str]:
    """Return what other tasks are told: a refusal's sentence and class, else a traceback and ""."""
    if isinstance(error, StratagemError) and not isinstance(error, ReplicaError):
        return str(error), type(error).__name__
    return described(error), ""


def _shorten(whole: TracebackException, error: BaseException) -> None:
    of_other = isinstance(error, StratagemError) and bool(error.who)
    if of_other:  # the message says what happened to the other replica
        whole.__cause__ = whole.__context__ = None
    for inner, its in ((whole.__cause__, error.__cause__), (whole.__context__, error.__context__)):
        if inner is not None and its is not None:
            _shorten(inner, its)
    frames = whole.stack
    if of_other:
        frames[:] = [frame for frame in frames if _is_users(frame)]
    ours_failed = bool(frames) and _is_ours(frames[-1]) and not isinstance(error, StratagemError)
    if not ours_failed and not all(map(_is_ours, frames)):
        frames[:] = [frame for frame in frames if not _is_ours(frame)]


def _is_ours(frame: FrameSummary) -> bool:
    made = frame.filename == "<string>" and frame.name == "__init__"  # of a dataclass
    return made or frame.filename.startswith(_PACKAGE)


def _is_users(frame: FrameSummary) -> bool:
    return not frame.filename.startswith(("<", _PACKAGE, _LIBRARY)) and not any(
        folder in frame.filename for folder in ("site-packages", "dist-packages")
    )


#: functions that add to an error what is known of its circumstances
explainers: list[Callable[[BaseException], None]] = []


def install() -> None:
    """Show errors that end this process by `described`, unless there is another excepthook."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt) and not os.environ.get(VARIABLE):
        print(_interrupted(error), file=sys.stderr)
        return
    for explain in explainers:
        explain(error)
    sys.stderr.write(described(error))


def _interrupted(error: BaseException) -> str:
    scripts = [f for f in TracebackException.from_exception(error).stack if _is_users(f)]
    if not scripts:
        return "Interrupted."
    return f"Interrupted in {scripts[-1].filename}, line {scripts[-1].lineno}."
