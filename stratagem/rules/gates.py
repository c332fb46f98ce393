"""Gates: who may start on more work now, what a push counts, and whether an update is due.

    AllOf     all parts of one global batch                 Synchronous()
    FirstOf   the first N of N + b                          Synchronous(spares=b)
    Buffered  any K                                         Asynchronous(buffer=K)
    Bounded   another gate, nobody far ahead of the last    Asynchronous(bound=s)

Every gate keeps this promise: while the epoch is not over and a worker is here, a worker may act.
A worker has a ticket, or may take one, or the gate is open, or more work is still to be queued.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from stratagem.errors import UsageError
from stratagem.rules.ticket_states import ActiveWorker, HeldTicket, TicketStates
from stratagem.rules.tickets import Push, Ticket, Verdict
from stratagem.rules.updates import Policy, Synchronous, Updates

#: the verdict on what is kept in step: all of it
_WHOLE = Verdict(True, 0, 1.0, 1.0, "")


class Gate(ABC):
    """Decisions about the states of tickets; a gate changes nothing and remembers nothing."""

    #: whether only gradients of the current version count
    synchronous = True
    #: whether workers wait for the lowest clock to rise
    by_clock = False

    @abstractmethod
    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        """Return whether a free member may draw the front ticket of the queue, which has one."""

    @abstractmethod
    def opens(self, states: TicketStates) -> bool:
        """Return whether the pushes kept make an update."""

    def backup(self, states: TicketStates) -> Ticket | None:
        """Return a ticket that a free member may do a second time, now that the queue is empty."""
        return None

    def judge(self, states: TicketStates, push: Push, tau: int) -> Verdict:
        """Return the verdict on a push whose ticket is the worker's own, `tau` updates old."""
        if tau < 0:
            return dropped(tau, f"of version {push.version}, which has not been yet")
        if tau:
            return dropped(tau, f"of version {push.version}, not {states.version}")
        if self.opens(states):
            return dropped(tau, "the step was complete without it")
        return _WHOLE


class AllOf(Gate):
    """All parts of one global batch: the answer of one device.

    Every member that is here has a part of each batch, worker 0 first of all: it has callbacks and
    schedules, which count its parts as batches. Parts of members that died or are missing are done
    by the other members, at the same version, and by worker 0 only if it is alone. Nobody starts on
    the next batch before the version has grown.
    """

    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        queue, batch = states.queue, states.batch
        begun = queue.batch == batch
        if not begun and (states.held or states.kept):
            return False
        members = states.active_workers.members
        if begun and member.batch == batch:  # one that had its part
            here = len(members)
            return queue.of_front > here - states.had and (member.worker != 0 or here == 1)
        first = members.get(0, member)
        waits = first is not member and not (begun and first.batch == batch)
        return not waits or queue.of_front > 1  # a part is there for certain

    def opens(self, states: TicketStates) -> bool:
        return not states.held and bool(states.kept) and states.queue.batch != states.batch


class FirstOf(Gate):
    """The first N = workers - spares; the rest of the step is not waited for.

    N + spares tickets are given out at a version, one to a member; when members are missing, those
    who are here draw their tickets too. When a closed queue runs empty, at most `spares` idle
    members do a second time what other members hold. So as long as no more than `spares` members
    stand still, and one does not, the epoch goes on to its end.

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

    def number(self, states: TicketStates) -> int:
        """Return N: how many gradients make an update."""
        return max(1, (self.workers or len(states.active_workers)) - self.spares)

    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        number = self.number(states)
        if _enough(states, number):
            return False
        given = len(states.held) + len(states.kept)
        wanted = number + self.spares
        members = len(states.active_workers.members)
        if member.stamp != states.version:
            return given < wanted or given < members
        # one that had its ticket leaves enough for those who had none
        return given + members - states.served < wanted

    def opens(self, states: TicketStates) -> bool:
        return _enough(states, self.number(states))

    def backup(self, states: TicketStates) -> Ticket | None:
        if not states.queue.closed or states.copies >= self.spares or self.opens(states):
            return None
        if not states.held:
            return None
        return min(states.held.values(), key=_copies_then_age).ticket


class Buffered(Gate):
    """Any K, of any version; K = 1: every one for itself."""

    synchronous = False

    def __init__(self, number: int, policies: Sequence[Policy] = ()) -> None:
        self.number, self._policies = number, policies

    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        return True

    def opens(self, states: TicketStates) -> bool:
        return _enough(states, self.number)

    def judge(self, states: TicketStates, push: Push, tau: int) -> Verdict:
        if tau < 0:
            return super().judge(states, push, tau)
        factor = rate = 1.0
        workers = states.active_workers.admitted
        for policy in self._policies:
            times = policy.factor(tau, workers)
            if times is None:
                return dropped(tau, f"{tau} updates old: {policy}")
            factor *= times
            rate *= policy.rate(tau, workers)
        return Verdict(True, tau, factor, rate, "")


class Bounded(Buffered):
    """A member waits while its clock is more than `bound` ahead of the lowest."""

    by_clock = True

    def __init__(self, number: int, policies: Sequence[Policy], bound: int) -> None:
        super().__init__(number, policies)
        self.bound = bound

    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        return member.clock - states.active_workers.clocks.low <= self.bound


def gate_of(updates: Updates, workers: int) -> Gate:
    """Return the gate that a user's choice of updates means."""
    if isinstance(updates, Synchronous):
        return FirstOf(workers, updates.spares) if updates.spares else AllOf()
    if updates.bound is None:
        return Buffered(updates.buffer, updates.staleness)
    return Bounded(updates.buffer, updates.staleness, updates.bound)


def dropped(tau: int, why: str) -> Verdict:
    """Return the verdict on a push that does not count."""
    return Verdict(False, tau, 0.0, 1.0, why)


def _enough(states: TicketStates, number: int) -> bool:
    """Return whether `number` pushes are kept, or all that the rest of the epoch can give."""
    kept = len(states.kept)
    return kept >= number or (kept > 0 and states.queue.closed and kept == states.left)


def _copies_then_age(held: HeldTicket) -> tuple[int, int]:
    return len(held.members), held.ticket.serial
