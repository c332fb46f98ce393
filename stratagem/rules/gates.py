"""Gates: who may start on more work now, and whether what has come in makes an update.

    AllOf     all parts of one global batch                 Synchronous()
    FirstOf   the first N of N + b                          Synchronous(spares=b)
    Buffered  any K                                         Asynchronous(buffer=K)
    Bounded   another gate, nobody far ahead of the last    Asynchronous(bound=s)

Every gate keeps this promise: while the epoch is not over and somebody is here, somebody may act.
A worker has a ticket, or may take one, or the gate is open, or more work is still to be dealt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from stratagem.errors import UsageError
from stratagem.rules.crew import Member
from stratagem.rules.push import Ticket
from stratagem.rules.table import Hand, Table
from stratagem.rules.updates import Synchronous, Updates


class Gate(ABC):
    """Two decisions about a table; a gate changes nothing and remembers nothing."""

    #: whether only gradients of the current version count
    synchronous = True
    #: whether somebody waits for the lowest clock to rise
    by_clock = False

    @abstractmethod
    def admits(self, table: Table, member: Member) -> bool:
        """Whether a free member may draw the front ticket of the deck, which is not empty."""

    @abstractmethod
    def opens(self, table: Table) -> bool:
        """Whether the pushes kept make an update."""

    def backup(self, table: Table) -> Ticket | None:
        """A ticket that a free member may do a second time, now that the deck is empty."""
        return None


class AllOf(Gate):
    """All parts of one global batch: the answer of one device.

    Every member that is here has a part of each batch, worker 0 first of all: it has callbacks and
    schedules, which count its parts as batches. Parts of those that died or are missing are done
    by the others, at the same version, and by worker 0 only if it is alone. Nobody starts on the
    next batch before the version has grown.
    """

    def admits(self, table: Table, member: Member) -> bool:
        deck, batch = table.deck, table.batch
        begun = deck.batch == batch
        if not begun and (table.hands or table.kept):
            return False
        members = table.crew.members
        if begun and member.batch == batch:  # one that had its part
            here = len(members)
            return deck.of_front > here - table.had and (member.worker != 0 or here == 1)
        first = members.get(0, member)
        waits = first is not member and not (begun and first.batch == batch)
        return not waits or deck.of_front > 1  # a part is there for certain

    def opens(self, table: Table) -> bool:
        return not table.hands and bool(table.kept) and table.deck.batch != table.batch


class FirstOf(Gate):
    """The first N = workers - spares; the rest of the step is not waited for.

    N + spares tickets are given out at a version, one to a member; when some are missing, those
    who are here draw theirs too. When a closed deck runs empty, at most `spares` idle members do
    a second time what others have in hand. So as long as no more than `spares` members stand
    still, and one does not, the epoch goes on to its end.

    workers: how many are expected; 0: as many as are here.
    """

    def __init__(self, workers: int, spares: int) -> None:
        if workers and spares >= workers:
            raise UsageError(
                f"Synchronous(spares={spares}) leaves nobody to wait for among {workers} "
                f"worker{'s'[: workers > 1]}; have fewer spares or more workers."
            )
        self.workers = workers
        self.spares = spares
        self._number = workers - spares  # more than 0, if workers are expected

    def number(self, table: Table) -> int:
        """N: how many gradients make an update."""
        return self._number if self.workers else max(1, len(table.crew) - self.spares)

    def admits(self, table: Table, member: Member) -> bool:
        number = self.number(table)
        if _enough(table, number):
            return False
        given = len(table.hands) + len(table.kept)
        wanted = number + self.spares
        members = len(table.crew.members)
        if member.stamp != table.version:
            return given < wanted or given < members
        # one that had its ticket leaves enough for those who had none
        return given + members - table.served < wanted

    def opens(self, table: Table) -> bool:
        return _enough(table, self.number(table))

    def backup(self, table: Table) -> Ticket | None:
        if not table.deck.closed or table.copies >= self.spares or self.opens(table):
            return None
        if not table.hands:
            return None
        return min(table.hands.values(), key=_copies_then_age).ticket


class Buffered(Gate):
    """Any K, of any version; K = 1: every one for itself."""

    synchronous = False

    def __init__(self, number: int) -> None:
        self.number = number

    def admits(self, table: Table, member: Member) -> bool:
        return True

    def opens(self, table: Table) -> bool:
        return _enough(table, self.number)


class Bounded(Gate):
    """A member waits while its clock is more than `bound` ahead of the lowest."""

    by_clock = True

    def __init__(self, inner: Gate, bound: int) -> None:
        self.inner = inner
        self.bound = bound
        self.synchronous = inner.synchronous

    def admits(self, table: Table, member: Member) -> bool:
        ahead = member.clock - table.crew.clocks.low
        return ahead <= self.bound and self.inner.admits(table, member)

    def opens(self, table: Table) -> bool:
        return self.inner.opens(table)


def gate_of(updates: Updates, workers: int) -> Gate:
    """The gate that a user's choice of updates means."""
    if isinstance(updates, Synchronous):
        return FirstOf(workers, updates.spares) if updates.spares else AllOf()
    gate = Buffered(updates.buffer)
    return gate if updates.bound is None else Bounded(gate, updates.bound)


def _enough(table: Table, number: int) -> bool:
    """Whether `number` pushes are kept, or all that the rest of the epoch can give."""
    kept = len(table.kept)
    return kept >= number or (kept > 0 and table.deck.closed and kept == table.left)


def _copies_then_age(hand: Hand) -> tuple[int, int]:
    return len(hand.members), hand.ticket.serial
