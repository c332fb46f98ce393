"""Gates: whether a worker may draw a ticket, what its push counts, and when an update is due.

    AllOf     all parts of one global batch                 Synchronous()
    FirstOf   the first N of N + b                          Synchronous(spares=b)
    Buffered  any K                                         Asynchronous(buffer=K)
    Bounded   any K, no worker far ahead of the slowest     Asynchronous(bound=s)

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

#: the verdict on a push that counts in full
_WHOLE = Verdict(True, 0, 1.0, 1.0, "")


class Gate(ABC):
    """Decisions about the states of tickets; a gate changes nothing and remembers nothing."""

    #: whether only gradients of the current version count
    synchronous = True
    #: whether workers wait for the lowest clock to rise
    by_clock = False

    @abstractmethod
    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        """Return whether a member without a ticket may draw the front one of the queue."""

    @abstractmethod
    def opens(self, states: TicketStates) -> bool:
        """Return whether the kept pushes make an update."""

    def backup(self, states: TicketStates) -> Ticket | None:
        """Return a held ticket of which an idle member may make a copy; the queue is empty."""
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
    """All parts of one global batch: the result of one device.

    Every member gets a part of each batch. Worker 0 always does, and never two: its callbacks and
    schedules count its parts as batches. Parts of members that died or are missing are done by the
    other members at the same version, by worker 0 only if it is alone. The next batch begins when
    the update is made.

    In `admits`, `of_front` parts are left of the batch under way. A member takes a second part only
    if more are left than members without one. Until worker 0 has had its part, the last one is
    reserved for it.
    """

    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        queue, batch = states.queue, states.batch
        begun = queue.batch == batch
        if not begun and (states.held or states.kept):
            return False
        members = states.active_workers.members
        if begun and member.batch == batch:  # it has had its part
            without = sum(each.batch != batch for each in members.values())
            return queue.of_front > without and (member.worker != 0 or len(members) == 1)
        first = members.get(0, member)
        waits = first is not member and not (begun and first.batch == batch)
        return not waits or queue.of_front > 1  # a part remains for worker 0

    def opens(self, states: TicketStates) -> bool:
        return not states.held and bool(states.kept) and states.queue.batch != states.batch


class FirstOf(Gate):
    """The first N = workers - spares gradients; the step does not wait for the rest.

    N + spares tickets are given out per version, one to each member; members that are present draw
    those of missing ones, too. When a closed queue runs empty, at most `spares` idle members copy
    tickets that other members hold. So the epoch comes to its end as long as no more than `spares`
    members stand still, and one does not.

    In `admits`, at this version: `given` tickets are out or pushed, of at most `wanted`, and
    `members - served` members have had none. A member takes a second one only if enough are left
    for them. More members than expected still get one each.

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
        # a second ticket leaves enough for members that have had none
        return given + members - states.served < wanted

    def opens(self, states: TicketStates) -> bool:
        return _enough(states, self.number(states))

    def backup(self, states: TicketStates) -> Ticket | None:
        if not states.queue.closed or not states.held or self.opens(states):
            return None
        copies = sum(len(each.members) - 1 for each in states.held.values())
        if copies >= self.spares:
            return None
        return min(states.held.values(), key=_copies_then_age).ticket


class Buffered(Gate):
    """Any K gradients, of any version; K = 1: each makes an update by itself."""

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
    """As Buffered, but a member waits while its clock is over `bound` ahead of the lowest."""

    by_clock = True

    def __init__(self, number: int, policies: Sequence[Policy], bound: int) -> None:
        super().__init__(number, policies)
        self.bound = bound

    def admits(self, states: TicketStates, member: ActiveWorker) -> bool:
        return member.clock - states.active_workers.clocks.low <= self.bound


def gate_of(updates: Updates, workers: int) -> Gate:
    """Return the gate for a user's choice of updates."""
    if isinstance(updates, Synchronous):
        return FirstOf(workers, updates.spares) if updates.spares else AllOf()
    if updates.bound is None:
        return Buffered(updates.buffer, updates.staleness)
    return Bounded(updates.buffer, updates.staleness, updates.bound)


def dropped(tau: int, why: str) -> Verdict:
    """Return the verdict on a push that does not count."""
    return Verdict(False, tau, 0.0, 1.0, why)


def _enough(states: TicketStates, number: int) -> bool:
    """Return whether `number` pushes are kept, or all that are left of the epoch."""
    kept = len(states.kept)
    return kept >= number or (kept > 0 and states.queue.closed and kept == states.left)


def _copies_then_age(held: HeldTicket) -> tuple[int, int]:
    return len(held.members), held.ticket.serial
