"""The number of threads of a server's updates: several are tried in turns, the best is kept.

More threads shorten an update, but torch's threads spin for a while after it and take cores from
workers that compute. Which weighs more depends on the machine and the number of workers, so the
time from one update to the next is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

_TURN = 8  # updates in a turn with one number of threads
_SETTLES = 2  # first updates of a turn, not counted: threads start, caches fill
_TURNS = 2  # turns of each number
_CLEARLY = 0.95  # more threads must take less than this share of the time of fewer
_MOST = 4  # threads; more do not help, as memory is the limit


def choices(cores: int) -> list[int]:
    """Return the numbers of threads to try on a machine with so many cores."""
    return sorted({1, max(1, min(cores, _MOST))})


class ThreadTrial:
    """Chooses the number of threads for every update."""

    def __init__(
        self, numbers: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`numbers` of threads, the fewest first."""
        self._numbers, self._clock = list(numbers), clock
        self._taken: dict[int, list[float]] = {number: [] for number in numbers}
        self._plan = [n for _ in range(_TURNS) for n in numbers] if len(numbers) > 1 else []
        self._in_turn = 0
        self._last = 0.0
        #: for the next update
        self.threads = self._plan[0] if self._plan else self._numbers[0]

    def made(self) -> None:
        """Note that an update was made."""
        if not self._plan:
            return
        now = self._clock()
        if self._in_turn >= _SETTLES:
            self._taken[self.threads].append(now - self._last)
        self._last = now
        self._in_turn += 1
        if self._in_turn == _TURN:
            self._in_turn = 0
            self._plan.pop(0)
            self.threads = self._plan[0] if self._plan else self._best()

    def _best(self) -> int:
        times = {number: statistics.median(taken) for number, taken in self._taken.items()}
        best = self._numbers[0]
        for number in self._numbers[1:]:
            if times[number] < _CLEARLY * times[best]:
                best = number
        return best
