"""The ledger: deals the epoch's work, judges every push once, and says when an update is due.

It is pure: it knows no time, no socket and no tensor, and whoever drives it (a server, a test, a
simulation) calls it from one thread at a time and acts on what it says:

    ledger = Ledger(Synchronous(spares=1), workers=4)
    ledger.join(0); ...                    ledger.deal(batch=0, parts=3); ...; ledger.close_deck()
    ticket = ledger.take(worker)           None: wait for `turn` to change, then ask again
    verdict = ledger.push(Push(worker, ticket.serial, version, weight))
    update = ledger.ripe()                 after push, abandon, skip, leave and close_deck
"""

from __future__ import annotations

from math import fsum

from stratagem.errors import UsageError
from stratagem.rules.crew import Member
from stratagem.rules.gates import gate_of
from stratagem.rules.push import Push, Ticket, Update, Verdict
from stratagem.rules.staleness import Policy
from stratagem.rules.stats import Books, Stats
from stratagem.rules.table import Table
from stratagem.rules.updates import Asynchronous, Updates

#: what is kept in step: all of it
_WHOLE = Verdict(True, 0, 1.0, 1.0, "")


class Ledger:
    """The rule of one job, and its state.

    workers: how many are expected (the N of `spares` is workers - spares); 0: as many as are here.
    """

    def __init__(self, updates: Updates, version: int = 0, workers: int = 0) -> None:
        free = updates if isinstance(updates, Asynchronous) else Asynchronous()
        self._policies: tuple[Policy, ...] = free.staleness
        self._requeue = updates.requeue
        self._gate = gate_of(updates, workers)
        self._table = Table(version, free.warmup)
        self._books = Books()
        self._rate = 1.0  # the smallest that the pushes kept ask for
        #: whether a batch was left half done: in step its update would be another one
        self.torn = False
        #: changes whenever somebody who was refused by `take` may have to be asked again
        self.turn = 0

    @property
    def version(self) -> int:
        """How many updates the parameters have had."""
        return self._table.version

    @property
    def over(self) -> bool:
        """Whether the epoch is done: closed, every ticket settled, nothing waiting for the gate."""
        table = self._table
        return table.deck.closed and not table.left

    @property
    def left(self) -> int:
        """Tickets of the epoch that nobody has taken."""
        return len(self._table.deck)

    # who is here

    def join(self, worker: int) -> None:
        """A worker comes, or comes back: what it had before is put back."""
        self.leave(worker)
        self._table.crew.join(worker, self.version)
        self._books.open(worker)
        self.turn += 1

    def leave(self, worker: int) -> None:
        """A worker goes or died: its ticket is put back, pushes that were kept stay kept."""
        table = self._table
        member = table.crew.members.get(worker)
        if member is None:
            return
        self._return(member)
        table.disown(member)
        table.crew.leave(member, table.version)
        self.turn += 1

    # the epoch's work

    def deal(self, batch: int, parts: int = 1) -> int:
        """Add a batch to the epoch, cut into `parts` tickets; returns the serial of the first."""
        self.turn += 1
        return self._table.deck.add(batch, parts)

    def close_deck(self) -> None:
        """The epoch has no more batches."""
        self._table.deck.closed = True
        self.turn += 1

    def open_deck(self) -> None:
        """A new epoch begins."""
        self._table.deck.closed = False
        self.turn += 1

    def clear_deck(self) -> None:
        """What is left of the epoch is given up: nobody takes it any more."""
        table = self._table
        if table.deck.batch == table.batch and (table.kept or table.hands):
            self.torn = True
        table.deck.clear()
        self.turn += 1

    def end_early(self, last: int | None = None) -> tuple[Push, ...]:
        """The epoch has no more batches than those in hand.

        In step it ends with the batch that begins with the serial `last`, and what others have
        done of the next one is dropped: returns those pushes.
        """
        table = self._table
        dropped: tuple[Push, ...] = ()
        if last is None:
            table.deck.clear()
        elif table.batch > last:
            for serial in list(table.hands):
                table.revoke(serial)
            dropped = tuple(table.kept)
            table.kept.clear()
            self._books.drop(dropped)
            table.deck.clear()
        else:
            table.deck.end_with(last)
        self.close_deck()
        return dropped

    @property
    def begun(self) -> bool:
        """Whether pushes wait for others."""
        return bool(self._table.kept)

    @property
    def in_hands(self) -> int:
        """Tickets that somebody works on."""
        return len(self._table.hands)

    def may_take(self, worker: int) -> bool:
        """Whether `take` would give this worker a ticket."""
        member = self._table.crew.members.get(worker)
        return member is not None and (member.ticket or self._offer(member)) is not None

    def take(self, worker: int) -> Ticket | None:
        """Work for a worker: what it has in hand already, else a new ticket; None: not now."""
        table = self._table
        member = table.crew.members.get(worker)
        if member is None:
            raise UsageError(f"worker {worker} asks for work but is not in the job; join first.")
        if member.ticket is not None:
            return member.ticket
        ticket = self._offer(member)
        if ticket is None:
            return None
        deck = table.deck
        if deck.front is not None:
            deck.draw()
            self.turn += deck.front is None  # others may do backups now
        table.give(member, ticket)
        return ticket

    def holds(self, worker: int) -> Ticket | None:
        """What a worker has in hand."""
        member = self._table.crew.members.get(worker)
        return None if member is None else member.ticket

    def late(self, worker: int) -> bool:
        """Whether a worker computes in vain: its ticket was taken from it."""
        member = self._table.crew.members.get(worker)
        return member is not None and member.revoked is not None

    def overtaken(self) -> list[int]:
        """Workers that have become late since this was last asked."""
        found, self._table.overtaken = self._table.overtaken, []
        return found

    # what comes of it

    def push(self, push: Push) -> Verdict:
        """Judge a gradient that arrived, once and for all: kept for the gate, or dropped."""
        table = self._table
        tau = table.version - push.version
        member = table.crew.members.get(push.worker)
        if member is None or member.ticket is None or member.ticket.serial != push.serial:
            verdict = _dropped(tau, _stray(member, push))
        else:
            verdict = self._judge(push, tau)
            self._settle(member, member.ticket, push, verdict)
        self._books.receive(push.worker, tau, verdict.kept)
        return verdict

    def abandon(self, worker: int, serial: int) -> None:
        """A worker stopped computing; if the ticket is still its own it is put back."""
        member = self._table.crew.members.get(worker)
        if member is None:
            return
        if member.revoked == serial:
            member.revoked = None
        elif member.ticket is not None and member.ticket.serial == serial:
            self._return(member)
        else:
            return
        self._books.abandon(worker)

    def skip(self, worker: int, serial: int) -> None:
        """A worker is done with a ticket, and there is no gradient of it: nobody does it again."""
        table = self._table
        member = table.crew.members.get(worker)
        if member is None or member.ticket is None or member.ticket.serial != serial:
            self.abandon(worker, serial)  # it was taken from it: others have it now
            return
        table.crew.tick(member)
        table.unserve(member)
        if not table.release(member, member.ticket):
            table.revoke(serial)
        self._books.skipped += 1
        self.turn += 1

    def ripe(self) -> Update | None:
        """The update that is due, if the gate is open; it counts as made, the version grows."""
        table, gate = self._table, self._gate
        if not table.kept or not gate.opens(table):
            return None
        admitted = table.crew.admitted
        pushes = table.advance()
        self._books.apply(pushes)
        # without a barrier a new version lets nobody go on but those whom the warm-up admits
        self.turn += gate.synchronous or table.crew.admitted != admitted
        if gate.synchronous:
            for serial in list(table.hands):
                self._requeue_or_lose(table.revoke(serial))
        return Update(table.version, pushes, fsum([push.weight for push in pushes]), self._rate)

    # accounting

    def waited(self, worker: int, seconds: float) -> None:
        """A worker waited for others."""
        self._books.wait(worker, seconds)

    def stats(self) -> Stats:
        """The books as they stand."""
        return self._books.stats()

    # inside

    def _offer(self, member: Member) -> Ticket | None:
        """What a free member may have now."""
        table = self._table
        if not member.admitted:
            return None
        front = table.deck.front
        if front is None:
            return self._gate.backup(table)
        return front if self._gate.admits(table, member) else None

    def _judge(self, push: Push, tau: int) -> Verdict:
        """The rule for a push whose ticket is the worker's own."""
        table = self._table
        if tau < 0:
            return _dropped(tau, f"of version {push.version}, which has not been yet")
        if self._gate.synchronous:
            if tau:
                return _dropped(tau, f"of version {push.version}, not {table.version}")
            if self._gate.opens(table):
                return _dropped(tau, "the step was complete without it")
            return _WHOLE
        factor = rate = 1.0
        workers = table.crew.admitted
        for policy in self._policies:
            times = policy.factor(tau, workers)
            if times is None:
                return _dropped(tau, f"{tau} updates old: {policy}")
            factor *= times
            rate *= policy.rate(tau, workers)
        return Verdict(True, tau, factor, rate, "")

    def _settle(self, member: Member, ticket: Ticket, push: Push, verdict: Verdict) -> None:
        """Do what the verdict means for the ticket."""
        table = self._table
        clocks = table.crew.clocks
        low = clocks.low
        member.clock = clocks.tick(member.clock)
        alone = table.release(member, ticket)
        if verdict.kept:
            if not alone:
                table.revoke(ticket.serial)
                self.turn += 1
            self._rate = min(self._rate, verdict.rate) if table.kept else verdict.rate
            table.kept.append(push)
        else:
            table.unserve(member)
            table.disown(member)
            if alone:
                self._requeue_or_lose(ticket)
            self.turn += 1
        if self._gate.by_clock:
            self.turn += clocks.low > low

    def _return(self, member: Member) -> None:
        """A member will not do what it has in hand: that is nobody's verdict, so it is put back."""
        table, ticket = self._table, member.ticket
        table.unserve(member)
        if ticket is None:
            return
        table.disown(member)
        if table.release(member, ticket):
            self._books.requeued += 1
            if not table.deck.put_back(ticket) and (table.kept or table.hands):
                self.torn = True
        self.turn += 1

    def _requeue_or_lose(self, ticket: Ticket) -> None:
        """The rule wanted nothing of this ticket's work."""
        if self._requeue:
            self._table.deck.put_back(ticket)
            self._books.requeued += 1
        else:
            self._books.lost += 1


def _dropped(tau: int, why: str) -> Verdict:
    return Verdict(False, tau, 0.0, 1.0, why)


def _stray(member: Member | None, push: Push) -> str:
    """Why a push does not count whose ticket is not the worker's own."""
    if member is None:
        return f"worker {push.worker} is not in the job"
    if member.revoked == push.serial:
        member.revoked = None
        return "too late: the step was made without it"
    return f"worker {push.worker} does not hold ticket {push.serial}"
