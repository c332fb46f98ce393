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

from torch.optim import Optimizer
from torch.utils.data import DataLoader

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
        self._closed = self._warned = False
        #: an error found when the loop was left, raised at the next opportunity
        self._refusal: NotDistributable | None = None
        self._writes = LoopWrites(session)

    def gather_round(self, group: LoopDeviceGroup) -> None:
        """Have other devices share every ticket."""
        self._group, session = group, self.session
        parts, in_step = (1, False) if self._over else (session.plan.parts, session.in_step)
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
            self._held = self._ahead = None
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
            raise UsageError(
                "optimizer.step() was called outside of the loop over the prepared loader, or a "
                "second time for one batch; gradients belong to a batch that this worker was dealt."
            )
        self._writes.check_weights()
        ticket, examples = self._held
        self._held = None
        weight = examples * self._weight_of_row()
        self._carry.drop()
        session = self.session
        session.collect()
        if examples or session.plan.parts == 1:
            self._committer.begin(ticket, examples)
            self._committer.commit([0.0, weight])
        else:  # borrowed rows weigh nothing
            session.pass_over(ticket)
        session.forget_gradients()
        if session.in_step:
            self._fetch(ticket)
        self._writes.pushed()

    def _weight_of_row(self) -> float:
        """Return the loss' denominator per row, where workers share a batch."""
        weight = self._weights.of_batch()
        if self.session.plan.parts == 1:
            return 1.0
        if self._carry.is_here and weight != 1.0:
            raise NotDistributable(
                "gradients are added up over batches whose losses are not divided by their rows "
                "(ignored targets, class weights), and workers have but one weight for them all; "
                "step after each batch, or use sg.Model with compile(accumulate=...)."
            )
        return weight

    def bring_state(self, optimizer: Optimizer) -> None:
        """Before the optimizer's state is saved: read it, and its values, from the servers.

        In the middle of a batch the values stay: its gradient is computed with them.
        """
        self.session.read_state(values=self._held is None)
        self._writes.brought(values=self._held is None)

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
        self._writes.end()
        self._align()
        if self._refusal is not None:
            raise self._refusal
