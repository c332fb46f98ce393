"""Into how many chunks a batch of sequences is cut, by time or by rows: the first batches try some,
the rest take the fastest. The result of a batch is the same for any of them, so that trying costs
nothing but time."""

from __future__ import annotations

from typing import NamedTuple

#: batches that are not counted, and how often each number is tried
_WARM, _TRIES = 1, 2
#: chunks of time, and of rows, for each device
_TIME, _ROWS = (1, 2, 4, 8), (1, 2, 4)


class Chunks(NamedTuple):
    """So many pieces of a batch."""

    number: int
    #: of its rows, each with the whole sequence; else of time
    by_rows: bool = False

    def __str__(self) -> str:
        return f"{self.number} {'pieces by rows' if self.by_rows else 'chunks of time'}"


class ChunkChoice:
    """Chunks for one batch after another; `most` = None tries several numbers of chunks of time,
    and with `rows` of pieces by rows, too.

    choice.begin(length, rows)    how the next batch is cut
    choice.took(seconds)          what it took
    """

    def __init__(self, devices: int, most: int | None = None, *, rows: bool = False) -> None:
        self._most = most
        self._candidates = [Chunks(n * devices) for n in _TIME]
        if rows:
            self._candidates += [Chunks(n * devices, by_rows=True) for n in _ROWS]
        self._seconds: dict[Chunks, list[float]] = {}
        self._warm, self._extent, self._now = _WARM, (0, 0), False
        self._last = Chunks(1)

    def begin(self, length: int, rows: int = 0) -> Chunks:
        """How a batch of so many steps of time and rows is cut: into no more than there are."""
        if self._most is not None:
            return Chunks(max(min(self._most, length), 1))
        if not any(self._extent):
            self._extent = (length, rows)
            fitting = [c for c in self._candidates if c.number <= (length, rows)[c.by_rows]]
            self._candidates = fitting or [Chunks(max(length, 1))]
        self._now = (length, rows) == self._extent and not self.chosen
        self._last = self._next() if self._now else self.best
        most = (length, rows)[self._last.by_rows]
        return self._last._replace(number=max(min(self._last.number, most), 1))

    def _next(self) -> Chunks:
        """What was tried least often."""
        return min(self._candidates, key=lambda c: len(self._seconds.get(c, ())))

    def took(self, seconds: float) -> bool:
        """Seconds of the batch that was begun last; returns whether the choice is made by that."""
        if self._now and self._warm:
            self._warm -= 1
        elif self._now:
            self._seconds.setdefault(self._last, []).append(seconds)
            return self.chosen
        return False

    @property
    def chosen(self) -> bool:
        """Whether there is nothing left to try."""
        tried = all(len(self._seconds.get(c, ())) >= _TRIES for c in self._candidates)
        return len(self._candidates) == 1 or tried

    @property
    def best(self) -> Chunks:
        """The fastest so far; the fewest before any was timed."""
        known = {c: min(times) for c, times in self._seconds.items()}
        return min(known, key=lambda c: known[c]) if known else self._candidates[0]
