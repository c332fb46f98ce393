"""Workers' clocks for bounded staleness: who is ahead of the last, and by how much."""

from __future__ import annotations


class Clocks:
    """How many workers stand at which clock, and the lowest of them, without searching.

    The lowest never falls: who comes in, or comes back, starts at the lowest at least. Otherwise
    one newcomer at zero would stop everybody until it had caught up.
    """

    def __init__(self) -> None:
        self.low = 0
        self._at: dict[int, int] = {}

    def enter(self, clock: int) -> int:
        """A worker comes in; returns the clock it starts with."""
        clock = max(clock, self.low)
        self._at[clock] = self._at.get(clock, 0) + 1
        self._lift()
        return clock

    def leave(self, clock: int) -> None:
        """A worker that stood at `clock` goes."""
        self._at[clock] -= 1
        if not self._at[clock]:
            del self._at[clock]
            self._lift()

    def tick(self, clock: int) -> int:
        """A worker goes from `clock` to the next."""
        at, after = self._at, clock + 1
        at[after] = at.get(after, 0) + 1
        if at[clock] > 1:
            at[clock] -= 1
        else:
            self.leave(clock)
        return after

    def _lift(self) -> None:
        if self._at:
            while self.low not in self._at:
                self.low += 1
