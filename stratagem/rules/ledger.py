"""The ledger gives out the epoch's work, judges every push once, and says when an update is due.

It is pure: no clock, no socket, no tensor. Its caller (a server, a test, a simulation) uses one
thread at a time and acts on the answers:

    ledger = Ledger(Synchronous(spares=1), workers=4)
    ledger.join(0); ...                    ledger.deal(batch=0, parts=3); ...; ledger.close_epoch()
    ticket = ledger.take(worker)           None: wait for `turn` to change, then ask again
    verdict = ledger.push(Push(worker, ticket.serial, version, weight))
    update = ledger.ripe()                 after push, abandon, skip, leave and close_epoch
"""

from __future__ import annotations

from math import fsum

from stratagem.errors import UsageError
from stratagem.rules.gates import dropped, gate_of
from stratagem.rules.stats import StatsRecorder
from stratagem.rules.ticket_states import ActiveWorker, TicketStates
from stratagem.rules.tickets import Push, Ticket, Update, Verdict
from stratagem.rules.updates import Asynchronous, Updates


class Ledger:
    """The rule of one job, and its state.

    states     where every ticket is, and the active workers
    recorder   the statistics
    half_done  whether a batch was given up half done: in step its update would be another one
    turn       changes whenever `take` may have a ticket for a worker that got none before

    workers: how many are expected (the N of `spares` is workers - spares); 0: the active ones.
    """

    def __init__(self, updates: Updates, version: int = 0, workers: int = 0) -> None:
        warmup = updates.warmup if isinstance(updates, Asynchronous) else None
        self._requeue = updates.requeue
        self._gate = gate_of(updates, workers)
        self.states = TicketStates(version, warmup)
        self.recorder = StatsRecorder()
        self._rate = 1.0  # the smallest that a kept push asks for
        self.half_done = False
        self.turn = 0

    @property
    def version(self) -> int:
        """Return how many updates the parameters have had."""
        return self.states.version

    @property
    def over(self) -> bool:
        """Return whether the epoch is closed, every ticket settled, and no push waits."""
        states = self.states
        return states.queue.closed and not states.left

    # who is here

    def join(self, worker: int) -> None:
        """Add a worker; if it was active already, its ticket is put back."""
        self.leave(worker)
        self.states.active_workers.join(worker, self.version)
        self.recorder.open(worker)
        self.turn += 1

    def leave(self, worker: int) -> None:
        """Remove a worker that left or died: its ticket is put back, its kept pushes stay."""
        states = self.states
        member = states.active_workers.members.get(worker)
        if member is None:
            return
        self._return(member)
        member.batch = -1
        states.active_workers.leave(member, states.version)
        self.turn += 1

    # the epoch's work

    def deal(self, batch: int, parts: int = 1) -> int:
        """Add a batch to the epoch, cut into `parts` tickets; return the serial of the first."""
        self.turn += 1
        return self.states.queue.add(batch, parts)

    def close_epoch(self) -> None:
        """Declare that the epoch has no more batches."""
        self.states.queue.closed = True
        self.turn += 1

    def open_epoch(self) -> None:
        """Begin a new epoch, and give up what is left of the last one."""
        states = self.states
        if states.queue.batch == states.batch and (states.kept or states.held):
            self.half_done = True
        states.queue.clear()
        states.queue.closed = False
        self.turn += 1

    def end_early(self, last: int | None = None) -> tuple[Push, ...]:
        """End the epoch with the batches that workers hold.

        In step it ends with the batch that begins with the serial `last`; pushes for the next
        batch are dropped and returned.
        """
        states = self.states
        dropped: tuple[Push, ...] = ()
        if last is None:
            states.queue.clear()
        elif states.batch > last:
            for serial in list(states.held):
                states.revoke(serial)
            dropped = tuple(states.kept)
            states.kept.clear()
            self.recorder.drop(dropped)
            states.queue.clear()
        else:
            states.queue.end_with(last)
        self.close_epoch()
        return dropped

    def offer(self, worker: int) -> Ticket | None:
        """Return the ticket that `take` would give this worker now, if any."""
        states = self.states
        member = states.active_workers.members.get(worker)
        if member is None or member.ticket is not None or not member.admitted:
            return None if member is None else member.ticket
        front = states.queue.front
        if front is None:
            return self._gate.backup(states)
        return front if self._gate.admits(states, member) else None

    def take(self, worker: int) -> Ticket | None:
        """Return the ticket that a worker holds, else give it a new one; None: not now."""
        states = self.states
        member = states.active_workers.members.get(worker)
        if member is None:
            raise UsageError(f"worker {worker} asks for work but is not in the job; join first.")
        if member.ticket is not None:
            return member.ticket
        ticket = self.offer(worker)
        if ticket is None:
            return None
        queue = states.queue
        if queue.front is not None:
            queue.draw()
            self.turn += queue.front is None  # other workers may do backups now
        states.give(member, ticket)
        return ticket

    def holds(self, worker: int) -> Ticket | None:
        """Return the ticket that a worker holds."""
        member = self.states.active_workers.members.get(worker)
        return None if member is None else member.ticket

    def late(self, worker: int) -> bool:
        """Return whether a worker computes a ticket that was taken from it."""
        member = self.states.active_workers.members.get(worker)
        return member is not None and member.revoked is not None

    # the results

    def push(self, push: Push) -> Verdict:
        """Judge a gradient that arrived: it is kept for the gate, or dropped."""
        states = self.states
        tau = states.version - push.version
        member = states.active_workers.members.get(push.worker)
        if member is None or member.ticket is None or member.ticket.serial != push.serial:
            verdict = dropped(tau, _stray(member, push))
        else:
            verdict = self._gate.judge(states, push, tau)
            self._settle(member, member.ticket, push, verdict)
        self.recorder.receive(push.worker, tau, verdict.kept)
        return verdict

    def abandon(self, worker: int, serial: int) -> None:
        """Note that a worker stopped computing; put the ticket back if it is still its own."""
        member = self.states.active_workers.members.get(worker)
        if member is None:
            return
        if member.revoked == serial:
            member.revoked = None
        elif member.ticket is not None and member.ticket.serial == serial:
            self._return(member)
        else:
            return
        self.recorder.abandon(worker)

    def skip(self, worker: int, serial: int) -> None:
        """Settle a ticket without a gradient; no worker does it again."""
        states = self.states
        member = states.active_workers.members.get(worker)
        if member is None or member.ticket is None or member.ticket.serial != serial:
            self.abandon(worker, serial)  # another worker has it now
            return
        member.clock = states.active_workers.clocks.tick(member.clock)
        states.unserve(member)
        if not states.release(member, member.ticket):
            states.revoke(serial)
        self.recorder.skipped += 1
        self.turn += 1

    def ripe(self) -> Update | None:
        """Return the update that is due, if the gate is open, and count it as made."""
        states, gate = self.states, self._gate
        if not states.kept or not gate.opens(states):
            return None
        admitted = states.active_workers.admitted
        pushes = states.advance()
        self.recorder.apply(pushes)
        # without a barrier a new version concerns only workers that the warm-up admits
        self.turn += gate.synchronous or states.active_workers.admitted != admitted
        if gate.synchronous:
            for serial in list(states.held):
                self._requeue_or_lose(states.revoke(serial))
        return Update(states.version, pushes, fsum([push.weight for push in pushes]), self._rate)

    # inside

    def _settle(self, member: ActiveWorker, ticket: Ticket, push: Push, verdict: Verdict) -> None:
        """Settle a ticket by the verdict on its push."""
        states = self.states
        clocks = states.active_workers.clocks
        low = clocks.low
        member.clock = clocks.tick(member.clock)
        alone = states.release(member, ticket)
        if verdict.kept:
            if not alone:
                states.revoke(ticket.serial)
                self.turn += 1
            self._rate = min(self._rate, verdict.rate) if states.kept else verdict.rate
            states.kept.append(push)
        else:
            states.unserve(member)
            member.batch = -1
            if alone:
                self._requeue_or_lose(ticket)
            self.turn += 1
        if self._gate.by_clock:
            self.turn += clocks.low > low

    def _return(self, member: ActiveWorker) -> None:
        """Put back the ticket of a member that will not do it, without a verdict."""
        states, ticket = self.states, member.ticket
        states.unserve(member)
        if ticket is None:
            return
        member.batch = -1
        if states.release(member, ticket):
            self.recorder.requeued += 1
            if not states.queue.put_back(ticket) and (states.kept or states.held):
                self.half_done = True
        self.turn += 1

    def _requeue_or_lose(self, ticket: Ticket) -> None:
        """Requeue a ticket whose work was dropped, or count it as lost."""
        if self._requeue:
            self.states.queue.put_back(ticket)
            self.recorder.requeued += 1
        else:
            self.recorder.lost += 1


def _stray(member: ActiveWorker | None, push: Push) -> str:
    """Return why a push does not count whose ticket is not the worker's own."""
    if member is None:
        return f"worker {push.worker} is not in the job"
    if member.revoked == push.serial:
        member.revoked = None
        return "too late: the step was made without it"
    return f"worker {push.worker} does not hold ticket {push.serial}"
