"""How many threads make a server's updates: tried in turns, then kept.

More threads shorten an update, but those of torch go on spinning for a while after it, and then
they take the cores from workers that compute. Which of the two weighs more depends on the machine
and on how many workers there are, so it is measured where it counts: in the time from one update
to the next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

_TURN = 8  # updates with one number of threads, of which the first
_SETTLES = 2  # are not counted: threads start, caches fill
_TURNS = 2  # of each number
_CLEARLY = 0.95  # of the time that fewer threads take, to be worth more of them
_MOST = 4  # threads; an update is soon as fast as memory


def choices(cores: int) -> list[int]:
    """The numbers of threads that are worth a trial on a machine with so many cores."""
    return sorted({1, max(1, min(cores, _MOST))})


class ThreadTrial:
    """Says for every update how many threads to take."""

    def __init__(
        self, numbers: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`numbers` of threads, the fewest first."""
        self._numbers, self._clock = list(numbers), clock
        self._taken: dict[int, list[float]] = {number: [] for number in numbers}
        self._plan = [n for _ in range(_TURNS) for n in numbers] if len(numbers) > 1 else []
        self._in_turn = 0
        self._last = 0.0
        #: for the update that comes
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
