"""Into how many chunks a batch of sequences is cut, by time or by rows.

The first batches try several numbers, the rest take the fastest. The result is the same for any.
"""

from __future__ import annotations

from typing import NamedTuple

#: batches before the first is timed, and how often each number is tried
_WARM, _TRIES = 1, 2
#: numbers of chunks of time, and of rows, per device
_TIME, _ROWS = (1, 2, 4, 8), (1, 2, 4)


class Chunks(NamedTuple):
    """A number of chunks of a batch."""

    number: int
    #: chunks of rows, each with the whole sequence; else of time
    by_rows: bool = False

    def __str__(self) -> str:
        return f"{self.number} {'pieces by rows' if self.by_rows else 'chunks of time'}"


class ChunkChoice:
    """Chooses the chunks of one batch after another.

    choice.begin(length, rows)    how the next batch is cut
    choice.took(seconds)          how long that batch took

    `most` fixes the number; None tries several numbers of chunks of time and, with `rows`, of rows.
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
        """Return the chunks of a batch with `length` time steps and `rows` rows."""
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
        """Return the candidate tried least often."""
        return min(self._candidates, key=lambda c: len(self._seconds.get(c, ())))

    def took(self, seconds: float) -> bool:
        """Note the seconds of the batch begun last; return whether that completes the choice."""
        if self._now and self._warm:
            self._warm -= 1
        elif self._now:
            self._seconds.setdefault(self._last, []).append(seconds)
            return self.chosen
        return False

    @property
    def chosen(self) -> bool:
        """Whether no candidate is left to try."""
        tried = all(len(self._seconds.get(c, ())) >= _TRIES for c in self._candidates)
        return len(self._candidates) == 1 or tried

    @property
    def best(self) -> Chunks:
        """The fastest candidate so far; the first before any was timed."""
        known = {c: min(times) for c, times in self._seconds.items()}
        return min(known, key=lambda c: known[c]) if known else self._candidates[0]
