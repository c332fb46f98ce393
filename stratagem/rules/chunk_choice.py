"""Into how many chunks of time a sequence is cut: the first batches try some, the rest take the
fastest. The result of a batch is the same for any number, so that trying costs nothing but time."""

from __future__ import annotations

#: batches that are not counted, and how often each number is tried
_WARM, _TRIES = 1, 2


class ChunkChoice:
    """Numbers of chunks for one batch after another; `most` = None tries several.

    choice.begin(length)    how many chunks the next batch is cut into
    choice.took(seconds)    what it took
    """

    def __init__(self, devices: int, most: int | None = None) -> None:
        self._most = most
        self._candidates = [devices, 2 * devices, 4 * devices, 8 * devices]
        self._seconds: dict[int, list[float]] = {}
        self._warm, self._length, self._now = _WARM, 0, 0

    def begin(self, length: int) -> int:
        """Chunks of a batch of so many steps of time: no more than there are steps."""
        if self._most is not None:
            return max(min(self._most, length), 1)
        if not self._length:
            self._length = length
            fitting = [n for n in self._candidates if n <= length]
            self._candidates = fitting or [max(length, 1)]
        counted = length == self._length and not self.chosen
        self._now = self._next() if counted else 0
        return max(min(self._now or self.best, length), 1)

    def _next(self) -> int:
        """The number that was tried least often."""
        return min(self._candidates, key=lambda n: len(self._seconds.get(n, ())))

    def took(self, seconds: float) -> None:
        """Seconds of the batch that was begun last."""
        if self._now and self._warm:
            self._warm -= 1
        elif self._now:
            self._seconds.setdefault(self._now, []).append(seconds)

    @property
    def chosen(self) -> bool:
        """Whether there is nothing left to try."""
        tried = all(len(self._seconds.get(n, ())) >= _TRIES for n in self._candidates)
        return len(self._candidates) == 1 or tried

    @property
    def best(self) -> int:
        """The fastest so far; the fewest before any was timed."""
        known = {n: min(times) for n, times in self._seconds.items()}
        return min(known, key=lambda n: known[n]) if known else self._candidates[0]
