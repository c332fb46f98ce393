"""Errors on their way between the tasks of a job: what happened to whom, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem import errors
from stratagem.errors import ReplicaError, ReplicaFailed, ReplicaLost, StratagemError, UsageError

_TRACE = "Its traceback:"


def lost(name: str, why: str = "") -> ReplicaLost:
    """A server has died."""
    seen = f" ({why})" if why else ""
    return ReplicaLost(
        f"{name} is gone{seen}, and a share of the parameters with it, so the job ends. Its own "
        "output says why; the last checkpoint is whole. Start the job again from there.", name,
    )  # fmt: skip


def failed(name: str, text: str) -> ReplicaFailed:
    """A task raised an exception; `text` is its traceback, if there is one."""
    seen = f"{_TRACE}\n\n{text}" if text.strip() else "See its output for the reason."
    return ReplicaFailed(f"{name} raised an exception; the others were stopped. {seen}", name)


def headline(error: ReplicaError) -> str:
    """What is logged of an error that will be raised as well: a traceback is needed once."""
    return str(error).partition("\n")[0].removesuffix(f" {_TRACE}")


def note_of(error: StratagemError) -> dict[str, Any]:
    """The error, as a note to another task."""
    return {"error": type(error).__name__, "text": str(error), "who": getattr(error, "who", "")}


def error_of(note: Mapping[str, Any]) -> StratagemError:
    """The error that another task told of."""
    kind = getattr(errors, str(note["error"]), UsageError)
    if not (isinstance(kind, type) and issubclass(kind, StratagemError)):
        kind = UsageError
    text = str(note["text"])
    return kind(text, str(note.get("who", ""))) if issubclass(kind, ReplicaError) else kind(text)
