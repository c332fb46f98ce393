"""Waits for the processes of a job, and ends all of them when one fails.

A failure, or a signal to the launcher, begins an escalation: time for the tasks to end by
themselves, SIGTERM, SIGKILL. Every signal goes to a task's whole process group.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Protocol, TypeVar

from stratagem.cluster.spec import Task
from stratagem.launch.job_folder import JobFolder, TaskEnd
from stratagem.launch.output import Relay
from stratagem.launch.processes import Guard, Process
from stratagem.training.termination import EXIT_CODE

_KILL_AFTER = 3.0  # from SIGTERM to SIGKILL

Step = tuple[float, signal.Signals]


def steps_after(reason: signal.Signals | None, grace: float) -> tuple[Step, ...]:
    """Return the signals to send, with seconds from now; the reason None is a failed task."""
    if reason is None:
        return (grace, signal.SIGTERM), (grace + _KILL_AFTER, signal.SIGKILL)
    if reason is signal.SIGINT:
        return (0.0, reason), *steps_after(None, grace)
    return (0.0, signal.SIGTERM), (max(grace, _KILL_AFTER), signal.SIGKILL)


class Escalation:
    """The signals still to be sent, and when."""

    def __init__(self, steps: Sequence[Step], now: float) -> None:
        self._steps = deque((now + delay, number) for delay, number in steps)
        self.begun = False
        self.over = float("inf")

    def due(self, now: float) -> list[signal.Signals]:
        """Remove and return the signals whose time has come."""
        taken: list[signal.Signals] = []
        while self._steps and self._steps[0][0] <= now:
            taken.append(self._steps.popleft()[1])
            self.begun = True
            if not self._steps:
                self.over = now
        return taken

    def hurry(self, now: float) -> None:
        """Send the next signal now, and the later ones earlier by the same time."""
        if self._steps:
            early = self._steps[0][0] - now
            self._steps = deque((when - early, number) for when, number in self._steps)


class SignalQueue:
    """The signals sent to the launcher while it supervises, in order of arrival."""

    def __init__(self) -> None:
        self.arrived: deque[signal.Signals] = deque()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalQueue:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` ignores SIGHUP on purpose; a background job's ignored SIGINT is an accident.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        # Exit codes are lost if SIGCHLD is ignored.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(signal.Signals(number))


_TICK = 0.05
_CULPRIT = 3.0  # for a task to end that another task blames, however short the grace
_LINGER = 1.0  # for processes that a task started, once the task itself has ended
_HELD = 5.0  # after SIGKILL, until a process that is still there counts as stuck in the kernel


class LaunchPolicy:
    """What a launcher decides about its tasks; by default, nothing is started again."""

    def record(self, kind: str, process: Process | None, text: str) -> None:
        """Write down the "end" of a process, or an "action" of the launcher."""

    def restart(self, process: Process) -> Process | None:
        """Start a task that was killed again, if that is allowed."""
        return None

    def goes_on(self, process: Process) -> bool:
        """Whether the job goes on without a task that was killed, as long as others run."""
        return False

    def comes_too_late(self, process: Process) -> bool | None:
        """Whether a task waits for others that have done everything; None: perhaps, and it is
        given the grace to end."""
        return False

    def grace_after_signal(self) -> float:
        """Seconds for the tasks to end after a signal to the launcher, if more than the grace."""
        return 0.0


class Supervisor:
    """Waits for the tasks; afterwards `first` is the one that failed first, if one did.

    running -> ended (has a code) -> let go (nothing of its process group is left)
    """

    def __init__(
        self,
        processes: Sequence[Process],
        guard: Guard,
        relay: Relay,
        inbox: SignalQueue,
        grace: float,
        tracebacks: bool = False,
        policy: LaunchPolicy | None = None,
    ) -> None:
        self._guard, self._relay, self._inbox, self._grace = guard, relay, inbox, grace
        self._tracebacks, self._policy = tracebacks, policy or LaunchPolicy()
        #: the first signal to the launcher
        self.stopped: signal.Signals | None = None
        self._all: list[Process] = []
        #: not let go yet
        self._left: list[Process] = []
        #: failed without being told to end, in the order of their ends
        self._failed: list[Process] = []
        #: come too late, and the time at which each is killed
        self._late: dict[Process, float] = {}
        #: ended, while processes that they had started went on
        self._swept: set[Process] = set()
        self._escalation = Escalation((), time.monotonic())
        self._ended: SimpleQueue[Process] = SimpleQueue()
        for process in processes:
            self._watch(process)

    def _watch(self, process: Process) -> None:
        self._all.append(process)
        self._left.append(process)
        process.watch(self._ended)

    def run(self) -> None:
        """Return when no process of any task is left."""
        while self._left:
            self._hear()
            self._collect()
            now = time.monotonic()
            for number in self._escalation.due(now):
                self._send(number)
            self._kill_late(now)
            self._sweep(now)
            if now > self._escalation.over + _HELD:
                self._give_up()

    @property
    def first(self) -> Process | None:
        return culprit(self._failed)

    @property
    def code(self) -> int:
        """The exit code of the job: of the first failed task, as in a shell 128 + n for signal n;
        EXIT_CODE if tasks saved and ended."""
        first = self.first
        if first is not None:
            assert first.code is not None
            return first.code if first.code > 0 else 128 - first.code
        if any(process.code == EXIT_CODE for process in self._all):
            return EXIT_CODE
        return 128 + self.stopped if self.stopped is not None else 0

    def _hear(self) -> None:
        """Act on the signals that arrived; a closed stdout counts as SIGPIPE."""
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
            self._say(f"{number.name}: ending {_names(self._left)}.")
            if number is signal.SIGINT and not self._tracebacks:
                self._relay.interrupted.set()
            grace = max(self._grace, self._policy.grace_after_signal())
            self._escalation = Escalation(steps_after(number, grace), now)
        self.stopped = self.stopped or number

    def _collect(self) -> None:
        """Wait a moment for tasks to end, and note those that failed of themselves."""
        try:
            process = self._ended.get(timeout=_TICK)
        except Empty:
            return
        code = process.reap()
        self._policy.record("end", process, ending(code) if code else "")
        if not code:
            self._find_late()
        elif self.stopped is None and not self._escalation.begun and process not in self._late:
            self._take_failure(process, code)

    def _take_failure(self, process: Process, code: int) -> None:
        """Start a task that was killed again or go on without it; else let the others end."""
        if code < 0 and not self._failed:
            if (again := self._policy.restart(process)) is not None:
                self._relay.note(f"{process.task} was {ending(code)}, and is started again.")
                self._policy.record("action", process, "started again")
                self._watch(again)
                return
            if self._running() and self._policy.goes_on(process):
                self._relay.note(f"{process.task} was {ending(code)}; the others go on.")
                self._policy.record("action", process, "the others go on")
                return
        self._failed.append(process)
        if len(self._failed) == 1:
            self._begin_to_end(process, code)

    def _find_late(self) -> None:
        """After a task has finished the job, find tasks that started too late to take part."""
        now = time.monotonic()
        for process in self._running():
            if process not in self._late:
                late = self._policy.comes_too_late(process)
                if late is not False:
                    self._late[process] = now + (0 if late else self._grace)

    def _kill_late(self, now: float) -> None:
        for process, until in self._late.items():
            if now >= until and process.code is None:
                self._relay.note(f"{process.task} comes too late; the job is done.")
                self._late[process] = math.inf
                process.signal(signal.SIGKILL)

    def _running(self) -> list[Process]:
        return [process for process in self._left if process.code is None]

    def _begin_to_end(self, process: Process, code: int) -> None:
        """Begin the escalation after a first failure, which may name a task that still runs."""
        grace, because = self._grace, ""
        if process.because_of and not blames(process, process.task):
            grace, because = max(grace, _CULPRIT), f" because of {process.because_of}"
        self._escalation = Escalation(steps_after(None, grace), time.monotonic())
        if others := self._running():
            self._say(
                f"{process.task} failed{because} ({ending(code)}); {_names(others)} may take "
                f"{grace:g} s to end."
            )

    def _say(self, text: str) -> None:
        self._relay.note(text)
        self._policy.record("action", None, text)

    def _send(self, number: signal.Signals) -> None:
        for process in self._left:
            process.signal(number)
        alive = self._running()
        if alive and (number is signal.SIGKILL or self.stopped is None):
            self._say(f"{number.name} to {_names(alive)}, still running.")

    def _sweep(self, now: float) -> None:
        """Let go of tasks without processes; kill processes that outlive their task."""
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
                    self._swept.add(process)
                    self._say(f"{process.task} left processes behind; they are killed.")

    def _give_up(self) -> None:
        pids = ", ".join(f"{process.task} (pid {process.pid})" for process in self._left)
        self._say(f"the kernel holds {pids} in spite of SIGKILL; a driver may hang.")
        self._left.clear()


class Failed(Protocol):
    """A task that has failed, and the task that it blames."""

    @property
    def task(self) -> Task: ...
    @property
    def because_of(self) -> str: ...


F = TypeVar("F", bound=Failed)


def culprit(failed: Sequence[F]) -> F | None:
    """Return the task that failed first: from the first to end, follow whom each one blames."""
    seen = list(failed[:1])
    while seen:
        others = (each for each in failed if each is not seen[-1])
        found = next((each for each in others if blames(seen[-1], each.task)), None)
        if found is None:
            return seen[-1]
        if found in seen:  # they blame each other
            return seen[0]
        seen.append(found)
    return None


def blames(process: Failed, task: Task) -> bool:
    """Whether a process blames this task or one of its replicas ("worker 1 replica 2")."""
    return f"{process.because_of} ".startswith(f"{task} ")


def ending(code: int) -> str:
    """Describe how a process ended."""
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


TOLD_TO_END = 128 + signal.SIGTERM
_UNKNOWN = "no task has said why"


def write_end(job: JobFolder, code: int) -> int:
    """Write how the job ended, from the ends that its tasks wrote; return its exit code.

    `code`, from the process that started the tasks, counts where no task has written one.
    """
    ends = job.ends()
    first = culprit([end for end in ends if end.code and not end.stopped])
    if first is None:
        stopped = [end.code for end in ends if end.stopped]
        if EXIT_CODE in stopped:
            code = EXIT_CODE
        elif stopped:
            code = max(stopped) or TOLD_TO_END
        text = {EXIT_CODE: "saved", 0: ""}.get(code, "told to end" if stopped else _UNKNOWN)
        job.ended(code, text)
        return code
    job.ended(first.code, verdict(first))
    return first.code


def verdict(first: TaskEnd) -> str:
    """Describe the first failure, with the task's last lines."""
    killed = first.code - 128 in signal.valid_signals()
    return last_word(first.task, ending(128 - first.code if killed else first.code), first.tail)


def last_word(task: Task, how: str, tail: Sequence[str]) -> str:
    """Describe the first failure: task, ending, last lines of stderr."""
    if not tail:
        return f"{task} failed first: {how}; it wrote nothing to stderr."
    lines = (f"    {line}" for line in tail)
    return "\n".join([f"{task} failed first: {how}; its last lines:", *lines])
