"""Which workers are here, and where each ticket of the epoch is: queued, held, or done and kept."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.rules.tickets import Push, Ticket, TicketQueue
from stratagem.rules.updates import Ramp


@dataclass(slots=True, eq=False)
class ActiveWorker:
    """A worker that is here."""

    worker: int
    #: the ticket that it holds
    ticket: Ticket | None = None
    #: the serial of the ticket that was taken from it, while it works on that in vain
    revoked: int | None = None
    #: the batch (Ticket.first) of the ticket that it was last given and has not returned
    batch: int = -1
    #: the version at which it was last given a ticket that it has not returned
    stamp: int = -1
    clock: int = 0
    #: whether the warm-up lets it work
    admitted: bool = False


class ActiveWorkers:
    """Members by join order; the first `admitted` of them may take work.

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
        """A new member, behind all others."""
        member = self.members[worker] = ActiveWorker(worker)
        self._order.append(member)
        self.admit(version)
        return member

    def leave(self, member: ActiveWorker, version: int) -> None:
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


@dataclass(slots=True)
class HeldTicket:
    """A ticket that is being worked on, and by whom."""

    ticket: Ticket
    members: list[ActiveWorker]


class TicketStates:
    """What gates look at. A ticket is in one place only; several workers may have a copy of it."""

    def __init__(self, version: int, warmup: Ramp | None = None) -> None:
        self.version = version
        self.queue = TicketQueue()
        self.active_workers = ActiveWorkers(warmup)
        #: what is being worked on, by serial
        self.held: dict[int, HeldTicket] = {}
        #: pushes that wait for the gate
        self.kept: list[Push] = []
        #: how many members hold a ticket that another member holds, too
        self.copies = 0
        #: members that were given a ticket at this version
        self.served = 0
        #: the batch of the ticket given last (Ticket.first), and how many have had a part of it
        self.batch = -1
        self.had = 0
        #: workers whose ticket was taken from them; whoever reads it clears it
        self.overtaken: list[int] = []

    @property
    def left(self) -> int:
        """Tickets dealt and not yet applied."""
        return len(self.queue) + len(self.held) + len(self.kept)

    def give(self, member: ActiveWorker, ticket: Ticket) -> None:
        """Put a ticket, or a copy of one, into the hands of a free member."""
        held = self.held.get(ticket.serial)
        if held is None:
            self.held[ticket.serial] = HeldTicket(ticket, [member])
        else:
            held.members.append(member)
            self.copies += 1
        member.ticket, member.revoked = ticket, None
        if member.stamp != self.version:
            member.stamp = self.version
            self.served += 1
        batch = ticket.first
        if self.batch != batch:
            self.batch, self.had = batch, 0
        if member.batch != batch:
            member.batch = batch
            self.had += 1

    def disown(self, member: ActiveWorker) -> None:
        """The member goes, or has not done its part of the batch."""
        self.had -= member.batch == self.batch
        member.batch = -1

    def release(self, member: ActiveWorker, ticket: Ticket) -> bool:
        """Take a member's ticket from it; returns whether no other member has a copy."""
        members = self.held[ticket.serial].members
        members.remove(member)
        self._free(member)
        if members:
            self.copies -= 1
            return False
        del self.held[ticket.serial]
        return True

    def unserve(self, member: ActiveWorker) -> None:
        """What the member was given at this version does not count."""
        if member.stamp == self.version:
            member.stamp = -1
            self.served -= 1

    def revoke(self, serial: int) -> Ticket:
        """Take a ticket from all who have it; they are late."""
        held = self.held.pop(serial)
        self.copies -= len(held.members) - 1
        for member in held.members:
            self._free(member)
            member.revoked = serial
            self.overtaken.append(member.worker)
        return held.ticket

    def advance(self) -> tuple[Push, ...]:
        """The next version begins; returns the pushes that made it."""
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
