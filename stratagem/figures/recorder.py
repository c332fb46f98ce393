"""Record a task's figures and events: JSON lines in the folder that STRATAGEM_RECORD names.

    {"time": 1760000000.1, "event": "start", "task": "worker 1", "host": "b", "pid": 4711}
    {"time": 1760000001.1, "step": 96, "steps": 96, "rate": 1536.2, "compute": 0.0071, ...}
    {"time": 1760000002.0, "event": "save", "text": "digits.safetensors"}

Nothing is written if the variable is not set. Lines are appended: a task that is started again goes
on in its file, with another "start".
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("stratagem")

#: the environment variable with the folder of a run
VARIABLE = "STRATAGEM_RECORD"
PERIOD = 1.0  # seconds between two lines
ENDING = ".jsonl"

#: the recorders of this process by task, and events from before the first recorder
_recorders: dict[str, Recorder] = {}
_early: list[dict[str, Any]] = []


class Recorder:
    """The file of one task."""

    def __init__(self, folder: Path, task: str, *, announced: bool = True) -> None:
        self.task = task
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._wrote = 0.0
        self._idle: Callable[[], dict[str, Any]] | None = None
        name = re.sub(r"[^A-Za-z0-9]+", "-", task).strip("-") + ENDING
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if announced:
            self.write(event="start", task=task, host=socket.gethostname(), pid=os.getpid())

    def write(self, **figures: Any) -> None:
        """Append a line; a full disk ends the recording, not the training."""
        now = round(time.time(), 3)
        data = json.dumps({"time": now, **figures}, allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._file < 0 or os.getpid() != self._owner:
                return
            self._wrote = time.monotonic()
            try:
                os.write(self._file, data)  # one call: readers see whole lines
            except OSError as problem:
                self._file = -1
                log.warning("the figures of %s are no longer recorded: %s", self.task, problem)

    def keep_writing(self, idle: Callable[[], dict[str, Any]]) -> None:
        """Start a thread that writes `idle()` whenever no line was written for a period."""
        first, self._idle = self._idle is None, idle
        if first:
            threading.Thread(target=self._watch, name="stratagem-figures", daemon=True).start()

    def _watch(self) -> None:
        while self._file >= 0 and self._idle is not None:
            left = self._wrote + 1.2 * PERIOD - time.monotonic()
            if left <= 0:
                self.write(**self._idle())
                left = PERIOD
            time.sleep(left)


def recorder(task: str) -> Recorder | None:
    """Return the recorder of a task of this process, if figures are to be recorded."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    found = _recorders.get(task)
    if found is None:
        if not _recorders:
            atexit.register(_end, os.getpid())
        found = _recorders[task] = Recorder(Path(folder), task)
        while _early:
            found.write(**_early.pop(0))
    return found


def event(kind: str, text: str, **facts: Any) -> None:
    """Record an event: a fault, a join, a checkpoint. `about` names a task other than this one."""
    if not os.environ.get(VARIABLE):
        return
    entry = {"event": kind, "text": text, **facts}
    if _recorders:
        next(reversed(_recorders.values())).write(**entry)
    else:
        _early.append(entry)


def is_recording() -> bool:
    """Whether figures are to be recorded."""
    return bool(os.environ.get(VARIABLE))


def epoch_event(epoch: int, logs: Mapping[str, Any]) -> None:
    """Record the end of an epoch; `logs` are those of callbacks."""
    if os.environ.get(VARIABLE):
        numbers = {name: float(n) for name, n in logs.items() if isinstance(n, int | float)}
        known = {name: n for name, n in numbers.items() if math.isfinite(n)}
        event("epoch", f"epoch {epoch + 1}", epoch=epoch + 1, logs=known)


def _end(owner: int) -> None:
    """Record that this process ends; a process that is killed writes nothing."""
    error = getattr(sys, "last_value", None)
    why = {} if error is None else {"error": f"{type(error).__name__}: {error}"[:500]}
    if os.getpid() == owner:
        for each in _recorders.values():
            each.write(event="end", text=why.get("error", ""), **why)


def _forget() -> None:
    """Drop the recorders in a forked child, which is a different task or none."""
    _recorders.clear()
    _early.clear()


os.register_at_fork(after_in_child=_forget)
