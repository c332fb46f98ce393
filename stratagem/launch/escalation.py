"""Signals: those the launcher receives, and those it sends, ever harder to overlook."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

_KILL_AFTER = 3.0  # from SIGTERM to SIGKILL

Step = tuple[float, signal.Signals]


def steps_after(reason: signal.Signals | None, grace: float) -> tuple[Step, ...]:
    """What to send when, in seconds from now; the reason None is a task that failed."""
    if reason is None:
        return (grace, signal.SIGTERM), (grace + _KILL_AFTER, signal.SIGKILL)
    if reason is signal.SIGINT:
        return (0.0, reason), *steps_after(None, grace)
    return (0.0, signal.SIGTERM), (max(grace, _KILL_AFTER), signal.SIGKILL)


class Escalation:
    """The steps still to come."""

    def __init__(self, steps: Sequence[Step], now: float) -> None:
        self._steps = deque((now + delay, number) for delay, number in steps)
        self.begun = False
        self.over = float("inf")

    def due(self, now: float) -> list[signal.Signals]:
        """Take the steps whose time has come."""
        taken: list[signal.Signals] = []
        while self._steps and self._steps[0][0] <= now:
            taken.append(self._steps.popleft()[1])
            self.begun = True
            if not self._steps:
                self.over = now
        return taken

    def hurry(self, now: float) -> None:
        """Do not wait for the next step."""
        if self._steps:
            early = self._steps[0][0] - now
            self._steps = deque((when - early, number) for when, number in self._steps)


class Inbox:
    """The signals sent to the launcher while it supervises, in order of arrival."""

    def __init__(self) -> None:
        self.arrived: deque[signal.Signals] = deque()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Inbox:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` ignores SIGHUP on purpose; a background job's ignored SIGINT is an accident.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        # Where it is ignored, exit codes are lost.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(signal.Signals(number))
