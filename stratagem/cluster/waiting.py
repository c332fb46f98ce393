"""Waits of tasks for each other: limits, log lines and errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from stratagem.cluster.failure import Member
from stratagem.cluster.handshake import Stranger, WrongSecret
from stratagem.cluster.parsing import listing
from stratagem.errors import ReplicaMissing

log = logging.getLogger("stratagem")

FIRST = (2.0, 5.0)
EVERY = 10.0
_RETRY = 0.1  # seconds between two tries


class _Closes(Protocol):
    def close(self) -> None: ...


_Line = TypeVar("_Line", bound=_Closes)


class Wait:
    """A wait with a limit, and times to log: at the seconds of `first`, then every EVERY. Then
    `watch` is called, too, and may raise."""

    def __init__(
        self, limit: float, first: Sequence[float], watch: Callable[[], object] = lambda: None
    ) -> None:
        self.watch = watch
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
        """Seconds until it is time to log or to give up."""
        return max(0.0, min(self._next, self._limit) - self.waited)

    def due(self) -> bool:
        """Whether it is time to log; true once each time."""
        waited = self.waited
        if waited < self._next:
            return False
        while self._next <= waited:
            self._next = self._first.pop(0) if self._first else self._next + EVERY
        return True


def reach(
    members: Sequence[Member],
    attempt: Callable[[Member], _Line],
    patience: Wait,
    watch: Callable[[], object] = lambda: None,
    left: Callable[[Mapping[Member, _Line]], Collection[Member]] = lambda _: (),
) -> list[_Line]:
    """Connect to each member, trying until it answers; ReplicaMissing names those that never do.

    `watch` is called between two tries, and may raise, as when a member's process has died.
    `left` is called once all are reached, and returns members that have hung up meanwhile; another
    process may take their place. Replicas reach their chief this way, and tasks the servers.
    """
    found: dict[Member, _Line] = {}
    why = ""
    try:
        while True:
            for member in members:
                if member not in found:
                    try:
                        found[member] = attempt(member)
                    except (Stranger, WrongSecret):
                        raise
                    except OSError as problem:
                        why = str(problem)
            for member in left(found) if len(found) == len(members) else ():
                found.pop(member).close()
            missing = [member for member in members if member not in found]
            if not missing:
                return [found[member] for member in members]
            if patience.over:
                raise missing_error(missing, patience.waited, why)
            watch()
            say_missing(missing, patience)
            time.sleep(_RETRY)
    except BaseException:
        for line in found.values():
            line.close()
        raise


def say_missing(missing: Sequence[Member], patience: Wait) -> None:
    """Log the missing members, when it is time to."""
    if missing and patience.due():
        log.warning("waiting for %s, %.0f s", _places(missing), patience.waited)
        patience.watch()


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
