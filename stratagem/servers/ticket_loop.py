"""A custom loop with parameter servers: a loader of tickets, an optimizer that pushes.

    for x, y in loader:              a batch dealt to this worker, with the newest values
        loss_fn(model(x), y).backward()
        optimizer.step()             pushes the gradients; servers update the weights
        optimizer.zero_grad()

A batch without a step counts as done: it makes no update, and its gradients accumulate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem.capabilities import sentence
from stratagem.data.shares import count_rows
from stratagem.errors import NotDistributable, ReplicaError, UsageError
from stratagem.figures.meter import METER
from stratagem.rules.tickets import Ticket
from stratagem.servers.batch_source import (
    BatchSource,
    IndexSource,
    read,
    source_of,
)
from stratagem.servers.client import Assignment, EpochOver, FitOver
from stratagem.servers.loop_device_group import Accumulation, LoopDeviceGroup
from stratagem.servers.loop_session import LoopSession, LoopWrites
from stratagem.servers.push_committer import PushCommitter
from stratagem.training.loss_reading import PushWeights
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica

log = logging.getLogger("stratagem")


class TicketLoader:
    """Iterates over the batches dealt to this worker, until all of the epoch are done."""

    def __init__(
        self, session: LoopSession, loader: DataLoader[Any], replica: Replica, weights: PushWeights
    ) -> None:
        self.session, self.loader, self.device = session, loader, replica.device
        self._share, self._weights = replica.share, weights
        self._committer = PushCommitter(session, session.settings_of_update)
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._indices = IndexSource(loader)
        self._epoch = 0
        self._held: tuple[Ticket, int] | None = None
        #: what the last step has fetched already, with the values that it made
        self._ahead: Assignment | EpochOver | FitOver | None = None
        self._source: BatchSource | None = None
        #: the other devices of this worker
        self._group: LoopDeviceGroup | None = None
        self._over = session.over is not None
        self._carry = Accumulation(session.params, 1 if self._over else session.plan.parts)
        self._closed = self._warned = self._in_pass = False
        #: an error found when the loop was left, raised at the next opportunity
        self._refusal: NotDistributable | None = None
        self._gradients: list[Tensor | None] = []
        self._writes = LoopWrites(session)
        #: whether a worker has a part of some batches only
        self._spares = not self._over and session.plan.shares_batches and not session.plan.in_step
        if not self._over:
            session.until_end(self._writes)
        if self._spares and session.worker.is_chief:
            log.warning(
                "%r: a worker has parts of some batches only, so what the loop reads after "
                "optimizer.step(), counts or averages is not what one device has; with "
                "updates=sg.Synchronous() it is.",
                session.plan.updates,
            )

    def gather_round(self, group: LoopDeviceGroup) -> None:
        """Have other devices share every ticket."""
        self._group, session = group, self.session
        parts, in_step = (1, False) if self._over else (session.plan.parts, session.plan.in_step)
        group.commands.tell("begin", self._over, parts, in_step)
        if self._over:
            group.remove()
        else:
            group.exchange.after = session.made
            session.until_end(group)

    def _tell(self, *words: Any) -> None:
        if self._group is not None:
            self._group.commands.tell(*words)

    def __len__(self) -> int:
        """The number of batches of the whole epoch, on all workers."""
        return len(self.loader)

    @property
    def is_open(self) -> bool:
        """Whether the loop has not begun, or has a batch in hand."""
        return not self._over and (self._epoch == 0 or self._held is not None)

    def __iter__(self) -> Iterator[Any]:
        worker = self.session.worker
        if self._over:
            return
        self._check_open()
        self._epoch += 1
        worker.want(self._epoch)
        if worker.is_chief:
            worker.set_settings(self.session.settings())
        self._writes.send()
        self._in_pass = True
        source = partial(source_of, worker, self.loader, self._indices, self._epoch)
        self._source = source() if worker.is_chief else None
        number = 0
        self._tell("pass")
        if self._group is not None:
            self._group.up_to_date = False
        while True:
            work = self._next()
            if isinstance(work, FitOver):
                self._tell("over")
                self._end_as(work)
                self._align()
                return
            if isinstance(work, EpochOver):
                self._end_pass(number > 0)
                return
            batch, examples = self._batch(work.payload)
            self._held = (work.ticket, examples)
            total = int(work.payload["total"])
            self._carry.begin(examples, total)
            self._weights.begin()
            self._share.part = examples / max(total, 1)
            if self._group is None:
                self._share.set(examples, total)
            number += 1
            self._writes.begin_batch(number)
            try:
                yield batch if self.device.type == "cpu" else to_device(batch, self.device)
            except GeneratorExit:  # break, unless an error ends the training
                in_trouble = self._group is not None and self._group.in_trouble
                if worker.at_end is not None and not in_trouble:
                    self._leave(number)
                raise
            self._check_open()
            self._writes.check_weights()
            self._skip()

    def _next(self) -> Assignment | EpochOver | FitOver:
        """Wait for work, unless the last step has it."""
        work, self._ahead = self._ahead, None
        if work is None:
            work = self.session.worker.next(None if self._source is None else self._source.fill)
        return work

    def _fetch(self, ticket: Ticket) -> None:
        """After a push in step: wait for the new values, which come with the next work."""
        self._ahead = self._next()
        if not isinstance(self._ahead, Assignment):
            self.session.worker.refresh()
        elif self._ahead.ticket.first == ticket.first and not self._warned:
            self._warned = True
            log.warning(
                "not all of %d workers are here, and %s does several parts of a batch: what its "
                "loop does after optimizer.step() is done for each of them, with the weights from "
                "before the update.",
                self.session.plan.workers,
                self.session.worker.name,
            )
        if self._group is not None:
            self._group.commands.tell("values")
            self._group.spread()

    def _skip(self) -> None:
        """Count a batch without a step as done."""
        if self._held is not None:
            (ticket, _), self._held = self._held, None
            self.session.worker.ask("skip", serial=ticket.serial)
            self._carry.keep()
            if self._spares and self._carry.is_here:
                raise NotDistributable(
                    "call optimizer.step() and zero_grad() for each batch, or use "
                    "updates=sg.Synchronous(): gradients are added up over batches, and with "
                    "spares a worker has parts of some batches only."
                )
            if self._carry.is_here:
                self._weight_of_row()  # refuses gradients to which others cannot be added

    def _end_pass(self, worked: bool) -> None:
        """End the epoch: all workers take the last values, and the mean of the statistics."""
        session, worker = self.session, self.session.worker
        self._writes.check_state()
        self._in_pass = False
        self._tell("pass over")
        if self._group is not None:
            self._group.average()
        worker.report(session.statistics.here() if worked else None)
        if worker.is_chief:
            session.statistics.average([each for each in worker.gather()[0] if each is not None])
            session.statistics.send()
        else:
            session.statistics.receive(self._epoch)
        worker.refresh()
        self._align()
        self._writes.mark()

    def _align(self) -> None:
        if self._group is not None:
            self._group.align()

    def _leave(self, number: int) -> None:
        """Leave the loop in batch `number` of the pass; another worker does that batch."""
        with suppress(ReplicaError):  # a failed job: the error is raised elsewhere
            try:
                self._writes.check_weights()
                self._writes.check_state()
            except NotDistributable as refusal:
                self._refusal = refusal  # raised later: Python would drop it here
            self._held, self._ahead, self._in_pass = None, None, False
            self.session.worker.leave_loop(self._epoch)
            self._writes.mark()
        plan = self.session.plan
        if self.session.worker.is_chief and plan.parts == plan.workers:
            self._indices.rewind(number)

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._closed:
            raise UsageError(
                "the training of this loader has ended: another one was prepared, or strategy.run "
                "has returned; prepare it again."
            )

    def _batch(self, payload: Any) -> tuple[Any, int]:
        """Return this device's rows of a ticket, and the number of the ticket's examples."""
        if self._group is not None:
            self._group.commands.tell("batch", payload)
            return self._group.share(payload)
        with METER.loading():
            far = "indices" in payload
            whole = read(self.loader, payload["indices"]) if far else payload["rows"]
        return whole, 0 if "borrowed" in payload else max(count_rows(whole), 0)

    def hand_in(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: push the gradients, so that the step finds none."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise NotDistributable(
                "optimizer.step() was given a closure, and servers cannot evaluate the loss; call "
                "backward() first, and step() without it."
            )
        if getattr(optimizer, "found_inf", None) is not None:
            raise NotDistributable(
                "a GradScaler leaves it to this fused optimizer to unscale gradients, and servers "
                "would get them scaled; leave the scaler out and use bfloat16."
            )
        if self._held is None:
            raise UsageError(sentence("servers", "batches fetched ahead"))
        self._writes.check_weights()
        ticket, examples = self._held
        self._held = None
        weight = examples * self._weight_of_row()
        self._carry.drop()
        session = self.session
        session.collect()
        if session.plan.parts == 1 and self._group is None:
            self._gradients = [param.grad for param in session.params]
        borrowed = not examples and session.plan.parts > 1
        self._committer.begin(ticket, examples, borrowed=borrowed)
        self._committer.commit([0.0, weight])
        session.forget_gradients()
        if session.plan.in_step:
            self._fetch(ticket)
        self._writes.pushed()

    def give_back(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """After a step: let the loop read its gradients, where they are those of whole batches."""
        gradients, self._gradients = self._gradients, []
        for param, gradient in zip(self.session.params, gradients, strict=False):
            param.grad = gradient

    def _weight_of_row(self) -> float:
        """Return the loss' denominator per row, where workers share a batch."""
        weight, unit = self._weights.of_batch()
        if self.session.plan.parts == 1:
            return 1.0
        if self._carry.is_here and weight != 1.0:
            raise NotDistributable(
                "gradients are added up over batches whose losses are not divided by their rows "
                "(ignored targets, class weights), and workers have but one weight for them all; "
                "step after each batch, or use sg.Model with compile(accumulate=...)."
            )
        return weight * unit

    def bring_state(self, optimizer: Optimizer) -> None:
        """Before the optimizer's state is saved: read it, and its values, from the servers.

        In the middle of a batch the values stay: its gradient is computed with them.
        """
        self._writes.bring(values=self._held is None, in_pass=self._in_pass)

    def _end_as(self, over: FitOver) -> None:
        """Take the last values: the chief has ended the training."""
        self._over = True
        self.session.worker.refresh()
        self.session.take_last(over)

    def close(self) -> None:
        """End the training as the chief; as another worker, wait for the end."""
        worker = self.session.worker
        if self._refusal is None and not self._over:
            self._writes.send()
        self._closed = True
        if not (worker.is_chief or self._over):
            self._end_as(worker.retire())
        self.session.end()
        self._align()
        if self._refusal is not None:
            raise self._refusal
