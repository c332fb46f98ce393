"""The workers that are here, in the order they joined, and which of them the warm-up lets work."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.rules.clocks import Clocks
from stratagem.rules.push import Ticket
from stratagem.rules.ramp import Ramp


@dataclass(slots=True, eq=False)
class Member:
    """A worker that is here."""

    worker: int
    #: what it works on
    ticket: Ticket | None = None
    #: the serial of what it works on in vain: it was taken from it
    revoked: int | None = None
    #: the batch (Ticket.first) of the ticket that it was last given and has not returned
    batch: int = -1
    #: the version at which it was last given a ticket that it has not returned
    stamp: int = -1
    clock: int = 0
    #: whether the warm-up lets it work
    admitted: bool = False


class Crew:
    """Members by join order; the first `admitted` of them may take work.

    A clock counts (for bounded staleness) while its worker is admitted or still has a ticket.
    """

    def __init__(self, warmup: Ramp | None) -> None:
        self.clocks = Clocks()
        self.admitted = 0
        self._warmup = warmup
        #: by worker
        self.members: dict[int, Member] = {}
        self._order: list[Member] = []

    def __len__(self) -> int:
        return len(self._order)

    def join(self, worker: int, version: int) -> Member:
        """A new member, behind all others."""
        member = self.members[worker] = Member(worker)
        self._order.append(member)
        self.admit(version)
        return member

    def leave(self, member: Member, version: int) -> None:
        """A member goes; it holds no ticket any more."""
        del self.members[member.worker]
        self._order.remove(member)
        if member.admitted:
            self.admitted -= 1
            self.clocks.leave(member.clock)
        self.admit(version)

    def admit(self, version: int) -> None:
        """Let in as many as the warm-up allows at this version."""
        workers = len(self._order)
        allowed = self._warmup.allowed(version, workers) if self._warmup else workers
        while self.admitted < allowed:
            member = self._order[self.admitted]
            if member.ticket is None:
                member.clock = self.clocks.enter(member.clock)
            member.admitted = True
            self.admitted += 1
        while self.admitted > allowed:
            self.admitted -= 1
            member = self._order[self.admitted]
            member.admitted = False
            if member.ticket is None:
                self.clocks.leave(member.clock)

    def tick(self, member: Member) -> None:
        """A member pushed what it had."""
        member.clock = self.clocks.tick(member.clock)

    def freed(self, member: Member) -> None:
        """A member that is not admitted any more has no ticket any more."""
        self.clocks.leave(member.clock)
