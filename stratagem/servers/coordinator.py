"""The coordinator: the one server that decides, for all of them, what becomes of a gradient.

    push -> ledger: keep or drop, once for all shards -> orders to every server, in one order

Everything happens under the lock of the coordinator's own shard. A request waits in the thread of
its connection, so other workers are served meanwhile. Other requests: coordinator_requests.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import ReplicaError, UsageError
from stratagem.rules.ledger import Ledger
from stratagem.rules.tickets import Push, Verdict
from stratagem.rules.updates import Synchronous
from stratagem.servers.commands import Commands, OtherShard, OwnShard
from stratagem.servers.holders import Holders
from stratagem.servers.participants import Epoch, Participant, Participants
from stratagem.servers.training_plan import TrainingPlan

Answer = tuple[dict[str, Any], list[Tensor]]


class Coordinator:
    """The state of a training, and the decisions about it. Thread-safe."""

    def __init__(
        self,
        shard: OwnShard,
        far: Sequence[OtherShard],
        end_job: Callable[[ReplicaError], None],
        clock: Callable[[], float] = time.monotonic,
        alive: Callable[[], set[int]] = set,
        dismiss: Callable[[str, ReplicaError], None] = lambda *_: None,
    ) -> None:
        """alive     returns the workers whose processes are heard, whether they train or not
        dismiss   hangs up on the process of a placement, and tells it why
        """
        self.shard, self.clock = shard, clock
        self.end_job, self.alive, self.dismiss = end_job, alive, dismiss
        self.changed = shard.changed
        self.participants = Participants()
        self.commands = Commands(shard, far, end_job)
        self.ledger: Ledger | None = None
        self.plan: TrainingPlan | None = None
        #: the number of the present or last fit
        self.fit = -1
        self.running = False
        #: whether the chief has left, so that no other fit will begin
        self.closed = False
        self.epoch = Epoch()
        self.failure: ReplicaError | None = None
        #: which servers hold the other shards; none in a simulation
        self.holders: Holders | None = None
        #: workers that still have to be told that their ticket is late
        self._late: set[int] = set()
        #: by worker: the batch (Ticket.first) that it last did a part of
        self.done: dict[int, int] = {}
        #: when each waiting participant began to wait; by worker, when it last got a ticket
        self.waiting: dict[Participant, float] = {}
        self._taken: dict[int, float] = {}
        #: the epoch and the means that the chief has made of the workers' reports
        self.means: tuple[int, Tensor] | None = None
        #: the chief's messages at the begin and at the end of the fit
        self.beside = self.told = torch.empty(0, dtype=torch.uint8)

    def open(self, fit: int, plan: TrainingPlan, beside: Tensor) -> None:
        """Begin a fit; every server has the plan and its values."""
        with self.changed:
            self.check()
            self.plan, self.fit, self.running = plan, fit, True
            self.participants.open(plan.workers, self.clock())
            self.commands.begin(plan)
            self.ledger, self.epoch = Ledger(plan.updates, 0, plan.workers), Epoch()
            self._late.clear()
            self.done.clear()
            self.means = None
            self.beside, self.told = beside, torch.empty(0, dtype=torch.uint8)
            self.changed.notify_all()

    # --- who is here ------------------------------------------------------------------------

    def join(self, participant: Participant) -> Answer:
        """Let a worker take part, unless the fit has ended since the worker entered."""
        with self.changed:
            self.check()
            if participant.fit != self.fit:
                return {"over": True}, []
            if not self.running:
                return {"over": True, "after": self.commands.given}, [self.told]
            ledger = self.open_ledger()
            before = self.participants.here.get(participant.worker)
            if before is not None:
                self.leave(before, dead=True)
            self.participants.join(participant)
            ledger.join(participant.worker)
            self.changed.notify_all()
            return {}, []

    def leave(self, participant: Participant, *, dead: bool = False) -> None:
        """Remove a worker: its tickets go back to the queue.

        If it is dead, the other servers hang up as well; else it may take part in the next fit.
        """
        with self.changed:
            if self.participants.here.get(participant.worker) is not participant:
                return
            self.participants.leave(participant)
            if self.running and self.failure is None and self.ledger is not None:
                self.ledger.leave(participant.worker)
                self.settle()
                self.commands.give(["remove" if dead else "leave", participant.placement])
            self.changed.notify_all()

    def fail(self, failure: ReplicaError) -> None:
        """End the job; every later request is answered with the error."""
        with self.changed:
            self.failure = self.failure or failure
            self.shard.failure = self.failure
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the error that has ended the job, if any."""
        if self.failure is not None:
            raise self.failure

    def open_ledger(self) -> Ledger:
        """Return the ledger of the present fit; raise if there is none."""
        self.check()
        if self.ledger is None or not self.running:
            raise UsageError("no training is under way here")
        return self.ledger

    def ledger_of(self, participant: Participant) -> Ledger | None:
        """Return the ledger, if the participant's fit is under way.

        Raises if another process has taken its place.
        """
        if self.failure is not None:
            raise self.failure
        if not self.running or participant.fit != self.fit:
            return None
        here = self.participants.here.get(participant.worker)
        if participant.gone or here is not participant:
            self.participants.refuse(participant)
        return self.ledger

    @property
    def in_step(self) -> bool:
        """Whether every worker has a part of each batch."""
        updates = self.plan.updates if self.plan is not None else None
        return isinstance(updates, Synchronous) and not updates.spares

    def held_up(self) -> list[tuple[Participant, float]]:
        """Return the workers that hold tickets while another worker waits, and for how long.

        Does not wait for the lock: while an order is carried out the list is empty.
        """
        if not self.changed.acquire(blocking=False):
            return []
        try:
            if not self.waiting or not self.running or self.ledger is None:
                return []
            since, now = min(self.waiting.values()), self.clock()
            return [
                (each, now - max(since, self._taken[each.worker]))
                for each in self.participants.working()
                if self.ledger.holds(each.worker) and each not in self.waiting and not each.silent
            ]
        finally:
            self.changed.release()

    # --- work -------------------------------------------------------------------------------

    def offer(
        self,
        participant: Participant,
        epoch: int,
        have: int,
        low: int | None,
        since: float,
        strict: bool = False,
    ) -> Answer | None:
        """Return the answer for a worker that has waited since `since`; None: nothing yet.

        With `low`, the answer is "deal" when no more than so many tickets are queued: the
        worker deals batches itself.
        """
        with self.changed:
            ledger = self.ledger_of(participant)
            if ledger is None:
                return self.final_answer(participant)
            number = self.epoch.number
            if number <= epoch:
                return None
            if strict and number > epoch + 1:
                return {"over": epoch + 1, "after": self.commands.given}, []
            if participant.worker in self.participants.left_loop:
                self.participants.come_back(ledger, participant.worker)
            found = self._ticket(ledger, participant, have, since)
            if found is not None:
                return found
            if ledger.over:
                void = participant.worker in self.epoch.void
                return {"over": number, "after": self.commands.given, "void": void}, []
            few = low is not None and not self.epoch.dealt and len(ledger.states.queue) <= low
            return ({"deal": True}, []) if few else None

    def final_answer(self, participant: Participant) -> Answer:
        """Return the answer for a worker whose fit is over, with the order to fetch after."""
        after = self.commands.given * (participant.fit == self.fit)
        return {"end": True, "after": after}, [self.told]

    def _ticket(
        self, ledger: Ledger, participant: Participant, have: int, since: float
    ) -> Answer | None:
        """Return a ticket for the worker, if there is one, with the newest values."""
        ticket = ledger.take(participant.worker)
        if ticket is None:
            return None
        self._taken[participant.worker] = now = self.clock()
        ledger.recorder.wait(participant.worker, now - since)
        header, body = self.shard.fetch(participant.placement, have, 0)
        header["ticket"] = ticket
        header["epoch"], header["after"] = self.epoch.number, self.commands.given
        payload = self.epoch.payloads.get(ticket.serial) if self.epoch.payloads else None
        if payload is not None:
            header["payload"] = payload.numel()
            body = [payload, *body]  # first, to be unpacked while values arrive
        return header, body

    def abandon(self, participant: Participant, serial: int) -> None:
        """Take a ticket back from a worker."""
        with self.changed:
            ledger = self.ledger_of(participant)
            if ledger is not None:
                turn = ledger.turn
                ledger.abandon(participant.worker, serial)
                self.settle()
                self.wake(ledger, turn)

    def skip(self, participant: Participant, serial: int) -> None:
        """Count a ticket without a gradient as done."""
        with self.changed:
            ledger = self.ledger_of(participant)
            if ledger is not None:
                ticket, turn = ledger.holds(participant.worker), ledger.turn
                ledger.skip(participant.worker, serial)
                if ticket is not None and ticket.serial == serial:
                    self.epoch.payloads.pop(serial, None)
                    self.done[participant.worker] = ticket.first
                self.settle()
                self.wake(ledger, turn)

    def push(
        self,
        participant: Participant,
        push: Push,
        notes: Sequence[Any],
        *,
        used: list[bool] | None = None,
        settings: list[dict[str, Any]] | None = None,
        next: Sequence[int] | None = None,
        strict: bool | None = None,
        holders: int | None = None,
        lost: Sequence[int] | None = None,
    ) -> Answer:
        """Decide on a gradient that is in the worker's slot on every server.

        notes   the loss and the number of examples
        holders with backups, the generation of servers that have the gradient, without those in
                `lost`, which the worker does not reach any more
        next    the worker's epoch and version: the answer has its next ticket, if there is one,
                which saves waiting for the lock once more
        """
        with self.changed:
            ledger = self.ledger_of(participant)
            if ledger is None:
                why = "the training is over"
                return {"kept": False, "tau": 0, "why": why, "after": 0, "version": 0}, []
            if self.holders is not None and not self.holders.agreed(holders, lost or ()):
                self.check()
                return {"again": True}, []
            if settings:
                self.commands.give(["settings", settings])
            turn = ledger.turn
            verdict = self._decide(ledger, participant, push, notes, used)
            self.wake(ledger, turn)
            header = {
                "kept": verdict.kept,
                "tau": verdict.tau,
                "why": verdict.why,
                "after": self.commands.given,
                "version": ledger.version,
            }
            if next is None or self.epoch.number <= next[0]:
                return header, []
            if strict and self.epoch.number > next[0] + 1:
                return header, []
            found = self._ticket(ledger, participant, next[1], self.clock())
            if found is None:
                return header, []
            header["next"], body = found
            return header, body

    def _decide(
        self,
        ledger: Ledger,
        participant: Participant,
        push: Push,
        notes: Sequence[Any],
        used: list[bool] | None,
    ) -> Verdict:
        """Keep or drop a gradient, and apply the updates that it completes."""
        ticket = ledger.holds(push.worker)
        if ticket is not None and self.participants.left_loop and self.in_step:
            self.participants.refuse_alone(push.worker, ticket.first, self.done)
        turn, update = ledger.turn, None
        verdict = ledger.push(push)
        if verdict.kept:
            assert ticket is not None
            self.epoch.payloads.pop(ticket.serial, None)  # not needed again
            self.done[push.worker] = ticket.first
            loss, examples = notes
            self.epoch.tally.waiting.append((float(loss), push.weight, int(examples)))
            update = ledger.ripe()
            self.commands.take_in(participant.placement, push, verdict, used, update)
        if update is not None:
            self.epoch.tally.fold()
        if update is not None or not verdict.kept:
            self.settle()
        elif ledger.turn != turn or self._late:  # else no worker has become late
            self._tell_late()
        return verdict

    def wake(self, ledger: Ledger, turn: int) -> None:
        """Wake waiting threads if the ledger has changed since that turn."""
        if ledger.turn != turn or ledger.over:
            self.changed.notify_all()

    def settle(self) -> None:
        """Apply all other complete updates, and notify workers whose tickets are late now."""
        assert self.ledger is not None
        while (update := self.ledger.ripe()) is not None:
            self.commands.apply(update)
            self.epoch.tally.fold()
        self._tell_late()

    def _tell_late(self) -> None:
        assert self.ledger is not None
        self._late.update(self.ledger.states.overtaken)
        self.ledger.states.overtaken.clear()
        if not self._late:
            return
        for worker in sorted(self._late):
            participant = self.participants.here.get(worker)
            if participant is not None and self.ledger.late(worker):
                told = participant.tell({"news": self.ledger.version})
            else:
                told = True
            if told:
                self._late.discard(worker)
