"""The active workers, and where each ticket of the epoch is.

    queue  --give-->  held  --release, push-->  kept  --advance-->  (applied)
      ^                |
      +-- put back ----+   the worker left, or its work came too late (revoke)

A ticket is in one of these places only; several workers may hold copies of it. `served` is always
the number of members whose `stamp` is the version: gates ask for it often, also among thousands. A
member has a `ticket` exactly while `held[ticket.serial].members` contains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.rules.tickets import Push, Ticket, TicketQueue
from stratagem.rules.updates import Ramp


@dataclass(slots=True, eq=False)
class ActiveWorker:
    """A worker that takes part in the fit."""

    worker: int
    #: the ticket that it holds
    ticket: Ticket | None = None
    #: the serial of the ticket that was revoked while the worker still computes it
    revoked: int | None = None
    #: the batch (Ticket.first) of its last ticket, unless that was returned
    batch: int = -1
    #: the version at which it got its last ticket, unless that was returned
    stamp: int = -1
    clock: int = 0
    #: whether the warm-up admits it
    admitted: bool = False


class ActiveWorkers:
    """Members in the order of joining; the first `admitted` of them may take work.

    A clock counts (for bounded staleness) while its worker is admitted or still has a ticket.
    """

    def __init__(self, warmup: Ramp | None) -> None:
        self.clocks = Clocks()
        self.admitted = 0
        self._warmup = warmup
        #: by worker
        self.members: dict[int, ActiveWorker] = {}
        self._order: list[ActiveWorker] = []

    def __len__(self) -> int:
        return len(self._order)

    def join(self, worker: int, version: int) -> ActiveWorker:
        """Add a member at the end."""
        member = self.members[worker] = ActiveWorker(worker)
        self._order.append(member)
        self.admit(version)
        return member

    def leave(self, member: ActiveWorker, version: int) -> None:
        """Remove a member, which holds no ticket."""
        del self.members[member.worker]
        self._order.remove(member)
        if member.admitted:
            self.admitted -= 1
            self.clocks.leave(member.clock)
        self.admit(version)

    def admit(self, version: int) -> None:
        """Admit as many members as the warm-up allows at this version."""
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


class Clocks:
    """How many workers are at each clock value, and the lowest value, without searching.

    The lowest never falls: a worker that enters starts at the lowest at least. Otherwise a newcomer
    at zero would stop all others until it had caught up.
    """

    def __init__(self) -> None:
        self.low = 0
        self._at: dict[int, int] = {}

    def enter(self, clock: int) -> int:
        """Add a worker; return the clock it starts with."""
        clock = max(clock, self.low)
        self._at[clock] = self._at.get(clock, 0) + 1
        self._lift()
        return clock

    def leave(self, clock: int) -> None:
        """Remove a worker that is at `clock`."""
        self._at[clock] -= 1
        if not self._at[clock]:
            del self._at[clock]
            self._lift()

    def tick(self, clock: int) -> int:
        """Advance a worker from `clock` to the next value, and return that."""
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


@dataclass(slots=True)
class HeldTicket:
    """A ticket and the members that work on it."""

    ticket: Ticket
    members: list[ActiveWorker]


class TicketStates:
    """The state that gates decide on; see the invariants at the top of this file."""

    def __init__(self, version: int, warmup: Ramp | None = None) -> None:
        self.version = version
        self.queue = TicketQueue()
        self.active_workers = ActiveWorkers(warmup)
        #: tickets that members work on, by serial
        self.held: dict[int, HeldTicket] = {}
        #: pushes that wait for the gate to open
        self.kept: list[Push] = []
        self.served = 0
        #: the batch (Ticket.first) of the ticket given last
        self.batch = -1
        #: workers whose ticket was revoked; the reader clears the list
        self.overtaken: list[int] = []

    @property
    def left(self) -> int:
        """How many tickets were dealt and are not yet applied."""
        return len(self.queue) + len(self.held) + len(self.kept)

    def give(self, member: ActiveWorker, ticket: Ticket) -> None:
        """Give a ticket, or a copy of one, to a member that has none."""
        held = self.held.get(ticket.serial)
        if held is None:
            self.held[ticket.serial] = HeldTicket(ticket, [member])
        else:
            held.members.append(member)
        member.ticket, member.revoked = ticket, None
        if member.stamp != self.version:
            member.stamp = self.version
            self.served += 1
        self.batch = member.batch = ticket.first

    def release(self, member: ActiveWorker, ticket: Ticket) -> bool:
        """Take a member's ticket from it; return whether no other member has a copy."""
        members = self.held[ticket.serial].members
        members.remove(member)
        self._free(member)
        if members:
            return False
        del self.held[ticket.serial]
        return True

    def unserve(self, member: ActiveWorker) -> None:
        """Uncount the ticket that the member got at this version."""
        if member.stamp == self.version:
            member.stamp = -1
            self.served -= 1

    def revoke(self, serial: int) -> Ticket:
        """Take a ticket from all members that have it; they are late."""
        held = self.held.pop(serial)
        for member in held.members:
            self._free(member)
            member.revoked = serial
            self.overtaken.append(member.worker)
        return held.ticket

    def advance(self) -> tuple[Push, ...]:
        """Begin the next version; return the pushes that made it."""
        pushes = tuple(self.kept)
        self.kept.clear()
        self.version += 1
        self.served = 0
        self.active_workers.admit(self.version)
        return pushes

    def _free(self, member: ActiveWorker) -> None:
        member.ticket = None
        if not member.admitted:
            self.active_workers.clocks.leave(member.clock)
