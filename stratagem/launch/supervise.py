"""Sees the tasks of a job to their end, and all of them out of the way when one fails.

A failure, or a signal to the launcher, begins an escalation: the tasks may end by themselves,
are asked to, and are killed. Every signal goes to a task's whole process group.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from stratagem.cluster.spec import Task
from stratagem.launch.escalation import Escalation, Inbox, steps_after
from stratagem.launch.output import Relay
from stratagem.launch.processes import Guard, Process

_TICK = 0.05
_CULPRIT = 3.0  # for a task to end that another one blames, however short the grace
_LINGER = 1.0  # for what a task started, once the task itself has ended
_HELD = 5.0  # after SIGKILL: the kernel does not let the process go


class Supervisor:
    """Waits for the tasks; afterwards `first` is the one that failed first, if one did."""

    def __init__(
        self, processes: Sequence[Process], guard: Guard, relay: Relay, inbox: Inbox, grace: float
    ) -> None:
        #: those that failed of themselves, in the order in which they ended
        self._failed: list[Process] = []
        self.stopped: signal.Signals | None = None
        self._left = list(processes)
        self._swept: list[Process] = []
        self._guard, self._relay, self._inbox, self._grace = guard, relay, inbox, grace
        self._escalation = Escalation((), time.monotonic())
        self._ended: SimpleQueue[Process] = SimpleQueue()
        for process in processes:
            process.watch(self._ended)

    def run(self) -> None:
        """Return when nothing of any task is left."""
        while self._left:
            self._hear()
            self._collect()
            now = time.monotonic()
            for number in self._escalation.due(now):
                self._send(number)
            self._sweep(now)
            if now > self._escalation.over + _HELD:
                self._give_up()

    @property
    def first(self) -> Process | None:
        return culprit(self._failed)

    @property
    def code(self) -> int:
        """The exit code of the job, as a shell counts: 128 + n for signal n."""
        first = self.first
        if first is not None:
            assert first.code is not None
            return first.code if first.code > 0 else 128 - first.code
        return 128 + self.stopped if self.stopped is not None else 0

    def _hear(self) -> None:
        """Take the signals that came; a reader who closed our output is one of them."""
        arrived = self._inbox.arrived
        if self._relay.broken.is_set() and self.stopped is None:
            arrived.append(signal.SIGPIPE)
        while arrived:
            self._stop(arrived.popleft())

    def _stop(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._escalation.begun:
            self._escalation.hurry(now)
        else:
            self._relay.note(f"{number.name}: ending {_names(self._left)}.")
            self._escalation = Escalation(steps_after(number, self._grace), now)
        self.stopped = self.stopped or number

    def _collect(self) -> None:
        """Wait a moment for tasks to end, and note those that failed of themselves."""
        try:
            process = self._ended.get(timeout=_TICK)
        except Empty:
            return
        code = process.reap()
        if not code or self.stopped is not None or self._escalation.begun:
            return
        self._failed.append(process)
        if len(self._failed) == 1:
            self._let_the_others_end(process, code)

    def _let_the_others_end(self, process: Process, code: int) -> None:
        """After the first failure; one that another has caused may be still to come."""
        grace, because = self._grace, ""
        if process.because_of and not blames(process, process.task):
            grace, because = max(grace, _CULPRIT), f" because of {process.because_of}"
        self._escalation = Escalation(steps_after(None, grace), time.monotonic())
        if others := [each for each in self._left if each.code is None]:
            self._relay.note(
                f"{process.task} failed{because} ({ending(code)}); {_names(others)} may take "
                f"{grace:g} s to end."
            )

    def _send(self, number: signal.Signals) -> None:
        for process in self._left:
            process.signal(number)
        alive = [process for process in self._left if process.code is None]
        if alive and (number is signal.SIGKILL or self.stopped is None):
            self._relay.note(f"{number.name} to {_names(alive)}, still running.")

    def _sweep(self, now: float) -> None:
        """Let go of tasks of which nothing is left; end what others have left behind."""
        for process in list(self._left):
            if process.code is None:
                continue
            overdue = now - process.ended - _LINGER
            if process.gone() or overdue > _HELD:
                self._guard.remove(process)
                self._left.remove(process)
            elif overdue > 0:
                process.signal(signal.SIGKILL)
                if process not in self._swept:
                    self._swept.append(process)
                    self._relay.note(f"{process.task} left processes behind; they are killed.")

    def _give_up(self) -> None:
        pids = ", ".join(f"{process.task} (pid {process.pid})" for process in self._left)
        self._relay.note(f"the kernel holds {pids} in spite of SIGKILL; a driver may hang.")
        self._left.clear()


def culprit(failed: Sequence[Process]) -> Process | None:
    """Who failed first: whom the first to end blames, if that one failed, too, and so on."""
    seen = list(failed[:1])
    while seen:
        others = (each for each in failed if each is not seen[-1])
        found = next((each for each in others if blames(seen[-1], each.task)), None)
        if found is None:
            return seen[-1]
        if found in seen:  # each blames the other: the first to end, then
            return seen[0]
        seen.append(found)
    return None


def blames(process: Process, task: Task) -> bool:
    """Whether it ended because of this task, or of a replica of it: "worker 1 replica 2"."""
    return f"{process.because_of} ".startswith(f"{task} ")


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def _names(processes: Sequence[Process]) -> str:
    if len(processes) > 8:
        return f"{len(processes)} tasks"
    return ", ".join(str(process.task) for process in processes)
