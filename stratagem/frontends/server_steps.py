"""Training steps of a worker, which pushes gradients to parameter servers.

Pushed       a worker with one device
Grouped      a worker with several devices, which share every ticket and push one gradient
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shares import rows, share
from stratagem.frontends.adapter import TorchAdapter, Training
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.losses import SummedLoss
from stratagem.frontends.sources import Portion, Source
from stratagem.frontends.steps import Replicated
from stratagem.rules.tickets import Ticket
from stratagem.servers.batch_source import BatchSource, Cut
from stratagem.servers.client import Assignment, Client
from stratagem.servers.push_committer import GroupedCommitter, PushCommitter
from stratagem.servers.session import Late, Session
from stratagem.training import setup
from stratagem.training.gradient_placement import PlacedGradients
from stratagem.training.replica import END, CommandLoop, Replica
from stratagem.training.settings import Settings
from stratagem.wire.tree import gather_tree


class Pushed(TorchAdapter):
    """The step of a worker with one device."""

    def __init__(self, job: Fit, session: Session, replica: Replica) -> None:
        super().__init__(job.module, job.optimizer, job.recipe, replica)
        self.session, self.committer = session, PushCommitter(session, session.settings)
        homes = () if job.recipe.jit_compile else session.worker.memory.homes()
        self._placed = PlacedGradients(job.module, homes)
        #: the last outputs and targets, and whether they are of a part of a batch; metrics are
        #: updated only once the servers have accepted the gradient
        self._last: tuple[Any, Any, bool] | None = None
        #: the first batch of the epoch whose loss was not finite here
        self.broken: int | None = None

    def begin(self) -> None:
        """Begin an epoch."""
        self.recipe.metrics.reset()
        self._last = self.broken = None

    def push(self, work: Assignment, portion: Portion) -> bool:
        """Compute and push the gradient of a ticket; return whether the servers accepted it."""
        self.count()
        self.committer.begin(work.ticket, portion.examples)
        try:
            notes, output, y = self._gradients(portion)
        except Late:
            self.session.forget_gradients()
            self.committer.abandon()
            return False
        if self.broken is None and not math.isfinite(notes[0]):
            self.broken = work.ticket.batch
        counted = self.committer.commit(notes).counted
        self.session.forget_gradients()
        if counted:
            self._last = (output, y, portion.examples < portion.total)
        return counted

    def _gradients(self, portion: Portion) -> tuple[list[float], Any, Any]:
        session = self.session
        with self.autocast():
            with self._placed.forward():
                output, y, sample_weight = self.forward(portion)
            if portion.examples == portion.total:  # a whole batch, as on one device
                loss = self.recipe.loss.mean(output, y, sample_weight)
                weight = float(portion.examples)
            else:
                loss, weight = self._part(portion, output, y, sample_weight)
        if session.cancels and session.worker.is_late:
            raise Late
        session.worker.begin_backward(listens=session.cancels)
        with self._placed.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        return [float(loss.detach()) * weight, weight], output, y

    def _part(
        self, portion: Portion, output: Any, y: Any, sample_weight: Tensor | None
    ) -> tuple[Tensor, float]:
        """Return the loss of a part of a batch, and its weight among the parts."""
        numerator, denominator = self.recipe.loss.terms(output, y, sample_weight, portion.examples)
        if denominator is None:  # a sum over rows grows with the batch
            return numerator * (portion.total / portion.examples), float(portion.examples)
        weight = float(denominator)
        return (numerator / weight if weight else numerator * 0.0), weight

    def count(self, *, void: bool = False) -> None:
        """Update the metrics with the last batch, unless it is `void`."""
        last, self._last = self._last, None
        if last is not None and self.recipe.metrics and not void:
            output, y, part = last
            self.recipe.metrics.update(output, y, part=part)

    def states(self) -> list[Any]:
        """Return the counts of the metrics in this epoch, one for each device."""
        return [self.recipe.metrics.progress()]

    def spread(self) -> None:
        """Do nothing: there is no other device."""

    def close(self) -> None:
        """Do nothing: there is no other device."""


class DelayedMetrics:
    """Keeps outputs and targets for the metrics until the servers have accepted the gradient."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, bool]] = []

    def update(self, output: Any, target: Any, *, part: bool = False) -> None:
        self.seen.append((output, target, part))


class Grouped(Replicated):
    """The step of one device of a worker; the first device has the `session`, and pushes."""

    def __init__(self, job: Fit, replica: Replica, session: Session | None = None) -> None:
        self._metrics, self._later = job.recipe.metrics, DelayedMetrics()
        waiting: Any = self._later
        recipe = replace(job.recipe, metrics=waiting)
        # default settings: `wire=` applies only to the messages to servers
        super().__init__(Training(job.module, job.optimizer, recipe, Settings()), replica)
        self._job = job
        self.broken: int | None = None
        self._push = None if session is None else PushCommitter(session, session.settings)
        self._group = GroupedCommitter(self.committer, replica, self._push, self._adjust)
        self._trained = [p for p in job.module.parameters() if p.requires_grad]
        self.commands = CommandLoop(replica.collective)
        self._portion: Portion | None = None

    # --- as the first device ----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an epoch."""
        self._metrics.reset()

    def push(self, work: Assignment, portion: Portion) -> bool:
        """As the first device: compute a ticket on all devices; return whether it was accepted."""
        ticket = work.ticket
        words = [ticket.serial, ticket.batch, ticket.part, ticket.parts]
        self.commands.tell("work", words, work.epoch, work.payload)
        assert self._push is not None
        self._push.begin(ticket, portion.examples)
        return self.compute(portion)

    def count(self, *, void: bool = False) -> None:
        """Do nothing: `_finish` updates the metrics on each device."""

    def states(self) -> list[Any]:
        """As the first device: gather the counts of all devices in this epoch."""
        self.commands.tell("report")
        return [state for state in self.report() if state is not None]

    def spread(self) -> None:
        """As the first device: broadcast buffers and frozen parameters."""
        if self.beside():
            self.commands.tell("take_beside")
            self.take_beside()

    def close(self) -> None:
        """As the first device: end the training, and broadcast the last values."""
        self.commands.tell(END)
        self.finish()

    # --- on every device: the commands ------------------------------------------------------------

    def compute(self, portion: Portion) -> bool:
        """Compute this device's share of a ticket with the first device's values. Collective."""
        setup.spread(self._trained, self.replica)
        self.forget_gradients()
        self._portion = portion
        self.take(_share(portion, self.replica), True)
        return self._counted

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        """Reduce and push the gradients; the servers update."""
        self._counted = self._group.commit([numerator, denominator]).counted
        for output, target, part in self._later.seen:
            if self._counted and self._metrics:
                self._metrics.update(output, target, part=part)
        self._later.seen.clear()
        self.forget_gradients()

    def _adjust(self, notes: Sequence[float]) -> Sequence[float]:
        """Divide the summed gradient by the loss's denominator, or scale a sum up to the batch."""
        portion, buckets = self._portion, self.committer.buckets
        assert portion is not None
        above, below = notes
        if isinstance(self.recipe.loss, SummedLoss):
            factor = portion.total / portion.examples
            buckets.scale(torch.tensor(factor))
            return above * factor * portion.examples, portion.examples
        if self.recipe.loss.counted and below:
            buckets.scale(torch.tensor(portion.examples / below, dtype=buckets.notes.dtype))
        return notes

    def report(self) -> list[Any]:
        """Average running statistics, and gather the counts of the devices. Collective."""
        setup.average_buffers(self.module, self.replica)
        metrics = self._metrics
        mine = metrics.progress() if metrics.counted else None
        everybody = gather_tree(self.replica.collective, mine)
        metrics.reset()
        return everybody

    def beside(self) -> list[Tensor]:
        """Return buffers and frozen parameters, which a callback may have written."""
        frozen = [p for p in self.module.parameters() if not p.requires_grad]
        return [*frozen, *self.module.buffers()]

    def take_beside(self) -> None:
        setup.spread(self.beside(), self.replica)

    def finish(self) -> None:
        """Broadcast the last values. Collective."""
        super().close()
        setup.spread([*self.module.parameters(), *self.module.buffers()], self.replica)


def _share(portion: Portion, replica: Replica) -> Portion:
    """Return this device's rows of a ticket."""
    start, end = share(portion.examples, replica.count, replica.index)
    bounds = (start, end) if end > start else (0, 1)
    x, y, weight = (rows(part, *bounds) for part in (portion.x, portion.y, portion.weight))
    return Portion(x, y, weight, end - start, portion.examples)


def lead(job: Fit, session: Session, replica: Replica) -> Grouped:
    """As a worker's first device: begin the training on all devices."""
    CommandLoop(replica.collective).tell("begin", job.source.seed)
    setup.roll_dice_of_devices(replica)
    return Grouped(job, replica, session)


def assist(job: Fit, replica: Replica) -> None:
    """As another device: serve the first one's commands until the training ends."""
    job.module.to(replica.device)
    job.recipe.metrics.to(replica.device)
    job.module.train()
    _, (job.source.seed,) = CommandLoop(replica.collective).hear()
    setup.roll_dice_of_devices(replica)
    step, scheduler = Grouped(job, replica), BatchScheduler(job.source, 1)

    def work(words: list[int], epoch: int, payload: Any) -> None:
        given = Assignment(Ticket(*words), epoch, payload)
        step.compute(scheduler.portion(given, job.epochs.start))

    step.commands.serve({"work": work, "report": step.report, "take_beside": step.take_beside})
    step.finish()


# --- data for workers: the chief deals tickets, free workers take them ----------------------------


class BatchScheduler:
    """Deals the batches of a source as tickets, each batch in at most `parts` parts."""

    def __init__(self, source: Source, parts: int) -> None:
        self._source, self._parts = source, parts
        self._sent: BatchSource | None = None
        self._numbered = self._first = 0
        self._cuts: Iterator[Cut] | None = None

    @property
    def dealt(self) -> int:
        """Return the number of batches dealt in this epoch."""
        return self._numbered if self._sent is None else self._sent.dealt

    def open(self, worker: Client, number: int, limit: int | None) -> None:
        """As the chief: begin an epoch, the training's `number`-th."""
        runs = self._source.sizes(limit)
        if runs is None:
            cuts = islice(self._source.cuts(), limit)
            self._sent = BatchSource(worker, number, cuts, self._parts)
            self._sent.fill()
            return
        self._numbered = sum(batches for batches, _ in runs)
        worker.deal(number, 0, [(n, min(self._parts, rows)) for n, rows in runs], True)

    def open_segment(self, worker: Client, number: int, ends: Callable[[int], bool]) -> None:
        """As the chief: begin a segment of an epoch, the training's `number`-th."""
        assert self._cuts is not None
        first = self._sent.dealt if self._sent is not None else self._first
        self._sent = BatchSource(worker, number, self._cuts, self._parts, first=first, ends=ends)
        self._sent.fill()

    def open_epoch(self, epoch: int, limit: int | None) -> None:
        """As the chief: begin or continue an epoch of several segments."""
        self._sent, self._first = None, self._source.journal.seen
        left = None if limit is None else limit - self._first
        if left == 0:
            self._source.leave(nullcontext)
        self._cuts = islice(self._source.numbered(epoch), left)

    @property
    def dry(self) -> bool:
        """Whether the epoch has no more batches."""
        return self._sent is not None and self._sent.dry

    def fill(self) -> None:
        """As the chief: deal batches until enough tickets wait."""
        if self._sent is not None:
            self._sent.fill()

    def portion(self, work: Assignment, first: int) -> Portion:
        """Return the rows of a ticket; `first` is the number of the training's first epoch."""
        return self._source.part(first + work.epoch - 1, work.ticket, work.payload)
