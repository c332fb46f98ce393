"""How long to wait for others, and when to say again who is being waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence

EVERY = 10.0


class Patience:
    """A wait that speaks up: at the seconds of `first`, then every EVERY, until `limit`."""

    def __init__(self, limit: float, first: Sequence[float]) -> None:
        self._start = time.monotonic()
        self._limit = limit
        self._first = list(first)
        self._next = self._first.pop(0)

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._start

    @property
    def over(self) -> bool:
        """Whether the limit has passed."""
        return self.waited >= self._limit

    @property
    def left(self) -> float:
        """Seconds until the limit, never negative."""
        return max(0.0, self._limit - self.waited)

    @property
    def pause(self) -> float:
        """Seconds until there is something to say or to give up."""
        return max(0.0, min(self._next, self._limit) - self.waited)

    def due(self) -> bool:
        """Whether it is time to say who is being waited for; true once each time."""
        waited = self.waited
        if waited < self._next:
            return False
        while self._next <= waited:
            self._next = self._first.pop(0) if self._first else self._next + EVERY
        return True


def listing(names: Sequence[str], most: int = 8) -> str:
    """Join names for a sentence: "a, b and c"; a long list ends in "and 92 more"."""
    shown = list(names) if len(names) <= most else [*names[:most], f"{len(names) - most} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
