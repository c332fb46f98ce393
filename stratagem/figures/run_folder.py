"""Read a run's folder: its tasks, their lines of figures, and their events."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stratagem.errors import UsageError
from stratagem.figures.recorder import ENDING, VARIABLE

#: the name of the launcher's file, with the ends of its processes
LAUNCHER = "launcher"
SILENT = 10.0  # seconds without a line, after which a task is called silent
RUNS = Path("runs")

State = Literal["runs", "silent", "done", "dead"]
Line = dict[str, Any]


@dataclass
class RunTask:
    """One task of a run."""

    name: str
    host: str = ""
    pid: int = 0
    starts: int = 0
    lines: list[Line] = field(default_factory=list)
    #: when the task's last line was written, and the error that ended it: "" none, None: it runs
    heard: float = 0.0
    end: str | None = None

    @property
    def last(self) -> Line:
        """The newest line of figures with steps, or else the newest line."""
        steps = next((line for line in reversed(self.lines) if line.get("steps")), {})
        return steps or (self.lines[-1] if self.lines else {})

    @property
    def step(self) -> int:
        return int(self.lines[-1].get("step", 0)) if self.lines else 0

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def doing(self) -> str:
        """The wait or load that the task is in, and its length, if no step has just ended."""
        line = self.lines[-1] if self.lines else {}
        return f"{line['doing']} {line['seconds']:.0f} s" if "doing" in line else ""


class RunFolder:
    """Follows the files of a run; `read` takes the lines that were appended."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise UsageError(
                f"there is no run in {str(path)!r}; record one: stratagem run --record {path} "
                "train.py"
            )
        self.path = path
        self.tasks: dict[str, RunTask] = {}
        #: events in order of time, each with its task
        self.events: list[Line] = []
        self._places: dict[Path, int] = {}
        self._here = socket.gethostname()

    def read(self) -> None:
        """Add the new lines of figures to their tasks, and new events to `events`."""
        paths = sorted(self.path.glob(f"*{ENDING}"))
        new = [(path, line) for path in paths for line in self._appended(path)]
        for path, line in sorted(new, key=lambda each: float(each[1]["time"])):
            if "event" in line:
                self._happened(path, line)
                continue
            task = self._of_file(path)
            task.lines.append(line)
            task.heard = line["time"]
        self.events.sort(key=lambda line: line["time"])

    def _appended(self, path: Path) -> Iterable[Line]:
        at = self._places.get(path, 0)
        with path.open("rb") as file:
            file.seek(at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be unfinished
        self._places[path] = at + len(whole)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except ValueError as problem:
                raise UsageError(f"{path} is no file of figures: {problem}") from None
            if isinstance(line, dict) and isinstance(line.get("time"), int | float):
                yield line

    def _of_file(self, path: Path) -> RunTask:
        name = next((n for n in self.tasks if _stem(n) == path.stem), path.stem)
        return self.tasks.setdefault(name, RunTask(name))

    def _happened(self, path: Path, line: Line) -> None:
        kind, name = line["event"], str(line.get("about") or line.get("task") or "")
        if path.stem == LAUNCHER and not name:
            self.events.append({**line, "task": LAUNCHER})
            return
        task = self.tasks.setdefault(name, RunTask(name)) if name else self._of_file(path)
        if not line.get("about"):
            task.heard = line["time"]
        if kind == "launched" and not task.starts:
            task.host, task.pid, task.heard = line["host"], int(line["pid"]), line["time"]
        if kind == "start":
            task.host, task.pid, task.end = line["host"], int(line["pid"]), None
            task.starts += 1
        elif kind == "fault" and task.end in (None, ""):
            task.end = "fault"
        elif kind == "join" and task.end == "fault":
            task.end = None
        elif kind == "end":
            task.end = task.end or str(line.get("error", ""))
        self.events.append({**line, "task": task.name})

    def state(self, task: RunTask, now: float | None = None) -> State:
        """Whether a task runs, is silent, has ended well, or is dead."""
        if task.end is not None:
            return "dead" if task.end else "done"
        if task.host == self._here and not _lives(task.pid):
            # a process of a strategy ends with its parent, and writes no end of its own
            ended = [each.end for each in self.tasks.values() if each.end is not None]
            return "done" if ended and not any(ended) else "dead"
        if not task.lines and task.host == self._here:
            return "runs"  # the process is alive, and has made no step yet
        now = time.time() if now is None else now
        return "silent" if now - task.heard > SILENT else "runs"

    @property
    def is_over(self) -> bool:
        """Whether no task runs any more."""
        states = [self.state(task) for task in self.tasks.values()]
        return bool(states) and all(state in ("done", "dead") for state in states)


def _stem(task: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in task).split())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def find(given: str | None) -> RunFolder:
    """Open the given folder, the one that STRATAGEM_RECORD names, or the newest in runs/."""
    if given is not None:
        return RunFolder(Path(given))
    if os.environ.get(VARIABLE):
        return RunFolder(Path(os.environ[VARIABLE]))
    here = (
        [path for path in RUNS.iterdir() if any(path.glob(f"*{ENDING}"))] if RUNS.is_dir() else []
    )
    if not here:
        raise UsageError(
            "which run? Give its folder, or record one: stratagem run --record runs/first train.py"
        )
    return RunFolder(max(here, key=lambda path: path.stat().st_mtime))
