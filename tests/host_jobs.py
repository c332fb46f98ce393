"""A job between hosts, and what happens to its workers, on a script.

    with Hosts(3) as hosts, HostJob(hosts, source, faults=[
        "cut worker 1 at step 20 for 6 s",
        "stop worker 2 at step 40 for 2 s",
        "kill worker 2 at step 60",
        "start worker 2 at step 61",
    ]) as job:
        job.ends(60)
        job.said(0, "joins")

Worker i runs on host i. The steps are those of the chief, worker 0, whose script prints a line
that begins with `step 20` when that step is done.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Self

from tests.clock import Hang, wait_for
from tests.hosts import Hosts

_FAULT = re.compile(
    r"(?P<verb>cut|heal|kill|stop|wake|start) worker (?P<worker>\d+) at step (?P<step>\d+)"
    r"(?: for (?P<seconds>\d+(?:\.\d+)?) s)?"
)
_STEP = re.compile(r"step (\d+)\b")
#: lines that are too many to show
_MANY = re.compile(r"(step|update) ")
#: what ends a fault that lasts for some seconds
_ENDS = {"cut": "heal", "stop": "wake"}


@dataclass(frozen=True)
class HostFault:
    """What happens to a worker, or its host, when the chief has done a step."""

    verb: str
    worker: int
    step: int
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> HostFault:
        found = _FAULT.fullmatch(text)
        if found is None or (found["seconds"] and found["verb"] not in _ENDS):
            raise ValueError(
                f"{text!r} is no fault; write: cut (or stop) worker 1 at step 40 for 5 s, or kill, "
                "start, heal, wake worker 1 at step 40"
            )
        seconds = float(found["seconds"]) if found["seconds"] else None
        return cls(found["verb"], int(found["worker"]), int(found["step"]), seconds)


class Task:
    """One process of a worker; its output line by line, each with its time."""

    def __init__(self, process: Popen[str], heard: Callable[[str], object]) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._heard = heard
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))
            self._heard(line)

    def signal(self, number: signal.Signals) -> None:
        """To the script itself; nsenter, which waits for it, stops and dies with it."""
        outer = self.process.pid
        for child in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
            os.kill(int(child), number)
        if number is signal.SIGCONT:
            self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(5)


class HostJob:
    """Workers of one cluster, each on a host of its own."""

    def __init__(
        self, hosts: Hosts, source: str | Path, faults: Sequence[str] = (), **environ: str
    ) -> None:
        self._hosts, self._source = hosts, source
        self._environ = {"STRATAGEM_SECRET": "of a test", **environ}
        self.addresses = [f"{hosts.address(i)}:2222" for i in range(len(hosts))]
        self._due = [HostFault.parse(text) for text in faults]
        self._timers: list[threading.Timer] = []
        #: when each fault happened, by its verb and worker: the last one
        self.when: dict[tuple[str, int], float] = {}
        self.tasks: dict[int, list[Task]] = {i: [] for i in range(len(hosts))}
        for worker in self.tasks:
            self.start(worker)

    def start(self, worker: int) -> None:
        """Start a worker on its host, for the first time or again."""
        place = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": worker}}
        process = self._hosts.start(
            worker,
            sys.executable,
            *([self._source] if isinstance(self._source, Path) else ["-c", self._source]),
            TF_CONFIG=json.dumps(place),
            PYTHONUNBUFFERED="1",
            **self._environ,
        )
        self.tasks[worker].append(Task(process, self._hear if worker == 0 else len))

    def _hear(self, line: str) -> None:
        if found := _STEP.match(line):
            for fault in [each for each in self._due if each.step <= int(found[1])]:
                self._due.remove(fault)
                self.strike(fault.verb, fault.worker)
                if fault.seconds is not None:
                    again = (_ENDS[fault.verb], fault.worker)
                    self._timers.append(threading.Timer(fault.seconds, self.strike, again))
                    self._timers[-1].start()

    def strike(self, verb: str, worker: int) -> None:
        """Do it now."""
        self.when[verb, worker] = time.monotonic()
        task = self.tasks[worker][-1]
        {
            "cut": lambda: self._hosts.cut(worker),
            "heal": lambda: self._hosts.heal(worker),
            "kill": lambda: task.signal(signal.SIGKILL),
            "stop": lambda: task.signal(signal.SIGSTOP),
            "wake": lambda: task.signal(signal.SIGCONT),
            "start": lambda: self.start(worker),
        }[verb]()

    def said(self, worker: int, words: str, since: float = 0.0, seconds: float = 30.0) -> float:
        """Wait until a worker, in any of its lives, has said this; when that was."""

        def found() -> float | None:
            lines = [line for task in self.tasks[worker] for line in list(task.lines)]
            return next((when for when, line in lines if when >= since and words in line), None)

        wait_for(found, seconds, f"for {words!r} of worker {worker}: {self}")
        when = found()
        assert when is not None
        return when

    def ends(self, seconds: float) -> list[int]:
        """Wait for the end of everybody who runs; the exit codes of their last processes."""
        until = time.monotonic() + seconds
        while self._due or any(each[-1].process.poll() is None for each in self.tasks.values()):
            if time.monotonic() > until or (self._due and self.tasks[0][-1].process.poll()):
                raise Hang(f"the job has not ended: {self}; faults to come: {self._due}")
            time.sleep(0.05)
        for each in self.tasks.values():
            each[-1]._thread.join(5)
        return [each[-1].process.returncode for each in self.tasks.values()]

    def __str__(self) -> str:
        parts = []
        for worker, tasks in self.tasks.items():
            last = [line for task in tasks for _, line in task.lines if not _MANY.match(line)][-12:]
            parts += [f"--- worker {worker}", *last]
        return "\n".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        for tasks in self.tasks.values():
            for task in tasks:
                task.close()
