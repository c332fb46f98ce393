"""How long tasks of a cluster wait for each other, and what is said meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from stratagem.cluster.failure import Member
from stratagem.errors import ReplicaMissing

log = logging.getLogger("stratagem")

FIRST = (2.0, 5.0)
EVERY = 10.0


class Wait:
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


def say_missing(missing: Sequence[Member], patience: Wait) -> None:
    """Log who is being waited for, when it is time to."""
    if missing and patience.due():
        log.warning("waiting for %s, %.0f s", _places(missing), patience.waited)


def missing_error(missing: Sequence[Member], waited: float, why: str = "") -> ReplicaMissing:
    """Return the error that ends the wait."""
    seen = f" (last: {why})" if why else ""
    return ReplicaMissing(
        f"{_places(missing)} never came, in {waited:.0f} s{seen}. Start it there with the same "
        "cluster; if it runs, a firewall may be between: `stratagem check` on each machine says "
        "which port is shut.",
        missing[0].name,
    )


def _places(members: Sequence[Member]) -> str:
    return listing([f"{member.name} at {member.where}" for member in members])


def listing(names: Sequence[str], most: int = 8) -> str:
    """Join names for a sentence: "a, b and c"; a long list ends in "and 92 more"."""
    shown = list(names) if len(names) <= most else [*names[:most], f"{len(names) - most} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
