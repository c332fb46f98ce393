"""Finds late replicas: those that wait publish their turn; a replica that has not is late.

Gloo does not say which rank a collective waits for. After some seconds, and not before, waiting
replicas write the number of their operation to the group's store.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

from stratagem.cluster.membership import Failure, Member, Membership

log = logging.getLogger("stratagem")

FIRST, AGAIN, SETTLE = 5.0, 10.0, 1.0  # seconds: first line, next lines, time for peers to publish


def late_line(who: str, waited: float) -> str:
    """Return the log line about a replica that is alive but late."""
    return (
        f"waiting for {who}, {waited:.0f} s: it lives, but has not come to this step; does it "
        "compile (a first step), load data slowly, stand at a breakpoint, or run a loop of another "
        "length? `py-spy dump` shows where it is."
    )


def say_late(who: str, waited: float) -> None:
    """Log a line about a late replica."""
    log.warning("%s", late_line(who, waited))


class Limit:
    """How long a live replica may keep others waiting before all of them raise."""

    def __init__(self, membership: Membership, seconds: float) -> None:
        self._membership = membership
        self.seconds = seconds

    def give_up(self, who: str, waited: float) -> NoReturn:
        """End the wait for `who`, on every replica that waits."""
        known = self._membership.members
        member = next((each for each in known if each.name == who), Member(who, "late"))
        late = Failure(self._membership.rank, member, "late", f"in {waited:.0f} s")
        self._membership.announce(late)
        raise (self._membership.trouble or late).error()


class Lateness:
    """One replica's view of one group; `names` are the group's members by rank."""

    def __init__(
        self, store: Any, rank: int, names: Sequence[str], limit: Limit | None = None
    ) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._limit = limit
        self._first = min(FIRST, limit.seconds / 2) if limit is not None else FIRST
        self._published = -1
        self._next = FIRST

    def waiting(self, turn: int, waited: float) -> None:
        """Check, from a replica that waits in operation number `turn`, and log who is late."""
        if waited < self._first:
            self._next = FIRST + SETTLE
            return
        if self._published != turn:
            self._published = turn
            self._store.set(f"waits-{self._rank}", str(turn))
        if self._limit is not None and waited >= self._limit.seconds:
            self._limit.give_up(", ".join(self._late(turn)) or "the network", waited)
        if waited >= self._next:
            self._next = waited + AGAIN
            say_late(", ".join(self._late(turn)) or "the network", waited)

    def _late(self, turn: int) -> list[str]:
        return [name for rank, name in enumerate(self._names) if self._is_late(rank, turn)]

    def _is_late(self, rank: int, turn: int) -> bool:
        if rank == self._rank:
            return False
        key = f"waits-{rank}"
        return not self._store.check([key]) or int(self._store.get(key)) < turn
