"""The devices of one worker: they share every ticket, and hand in one gradient together.

    leader       talks to the servers; tells the others what to do, and gives them the values
    assistants   compute their share of the ticket's rows; gradients are added up in the group
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shard import rows, share
from stratagem.frontends.deals import dealer
from stratagem.frontends.feeds import Portion
from stratagem.frontends.loop import Fit
from stratagem.frontends.losses import SummedLoss
from stratagem.frontends.replicated import Replicated
from stratagem.rules.push import Ticket
from stratagem.strategies import setup
from stratagem.strategies.parameters.worker import Work
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings
from stratagem.wire.tree import broadcast_tree, gather_tree


class Later:
    """Stands in for the metrics until it is known whether a gradient counts."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def update(self, output: Any, target: Any) -> None:
        self.seen.append((output, target))


class GroupStep(Replicated):
    """A step that ends with the gradient of the whole ticket on every device; nobody updates."""

    def __init__(self, job: Fit, replica: Replica) -> None:
        self._metrics, self._later = job.recipe.metrics, Later()
        waiting: Any = self._later
        recipe = replace(job.recipe, metrics=waiting)
        # the type of the wire is for what goes to the servers
        super().__init__(job.module, job.optimizer, recipe, replica, Settings())

    def update(self) -> None:
        return None

    def count(self, kept: bool) -> None:
        """Metrics take in what was handed in, or forget it."""
        for output, target in self._later.seen:
            if kept and self._metrics:
                self._metrics.update(output, target)
        self._later.seen.clear()
        self.forget_gradients()

    def gradients(self, portion: Portion) -> tuple[Tensor, float]:
        """The ticket's loss, and what it weighs; its gradient is in every parameter."""
        self.forget_gradients()
        self.take(_share(portion, self.replica), True)
        above, below = (float(n) for n in self.exchange.buckets.notes)
        loss = torch.tensor(above / below if below else 0.0)
        if isinstance(self.recipe.loss, SummedLoss):  # a sum over rows grows with the batch
            factor = portion.total / portion.examples
            self.exchange.buckets.scale(torch.tensor(factor))
            return loss * factor, float(portion.examples)
        return loss, below


def _share(portion: Portion, replica: Replica) -> Portion:
    """This device's rows of a ticket."""
    start, end = share(portion.examples, replica.count, replica.index)
    bounds = (start, end) if end > start else (0, 1)
    x, y, weight = (rows(part, *bounds) for part in (portion.x, portion.y, portion.weight))
    return Portion(x, y, weight, end - start, portion.examples)


class Leader:
    """The first device of a group, as the worker's loop sees it."""

    def __init__(self, job: Fit, params: list[Any], replica: Replica) -> None:
        self._job, self._params, self._replica = job, params, replica
        broadcast_tree(replica.collective, ["begin", job.feed.dice()])
        setup.roll_dice_of_devices(replica)
        self._step = GroupStep(job, replica)

    def gradients(self, work: Work, portion: Portion) -> tuple[Tensor, float]:
        ticket = work.ticket
        told = [ticket.serial, ticket.batch, ticket.part, ticket.parts]
        self._tell("work", told, work.epoch, work.payload)
        setup.spread(self._params, self._replica)
        return self._step.gradients(portion)

    def settle(self, kept: bool) -> None:
        """Everybody counts what was handed in, or forgets it."""
        self._tell("kept", kept)
        self._step.count(kept)

    def states(self) -> list[Any]:
        """What each device has counted in this epoch."""
        self._tell("report")
        return [state for state in _report(self._job, self._replica) if state is not None]

    def spread(self) -> None:
        """What the leader has besides what is trained, for everybody."""
        if tensors := _beside(self._job):
            self._tell("beside")
            setup.spread(tensors, self._replica)

    def end(self) -> None:
        """The training is over: the last values, for everybody."""
        self._tell("end")
        self._step.close()
        setup.spread([*self._job.module.parameters(), *self._job.module.buffers()], self._replica)

    def _tell(self, *words: Any) -> None:
        broadcast_tree(self._replica.collective, list(words))


def assist(job: Fit, replica: Replica) -> None:
    """As another device of the group: do what the leader says until it says that all is done."""
    job.module.to(replica.device)
    job.recipe.metrics.to(replica.device)
    job.module.train()
    _, dice = broadcast_tree(replica.collective)
    job.feed.take_dice(dice)
    setup.roll_dice_of_devices(replica)
    step, hand = GroupStep(job, replica), dealer(job.feed, 1)
    params = [p for p in job.module.parameters() if p.requires_grad]
    while True:
        name, *words = broadcast_tree(replica.collective)
        if name == "work":
            told, epoch, payload = words
            setup.spread(params, replica)
            work = Work(Ticket(*told), epoch, payload)
            step.gradients(hand.portion(work, job.epochs.start, replica.device))
        elif name == "kept":
            step.count(bool(words[0]))
        elif name == "report":
            _report(job, replica)
        elif name == "beside":
            setup.spread(_beside(job), replica)
        else:
            step.close()
            setup.spread([*job.module.parameters(), *job.module.buffers()], replica)
            return


def _beside(job: Fit) -> list[Tensor]:
    """Frozen parameters that a callback may have written into, and buffers."""
    frozen = [p for p in job.module.parameters() if not p.requires_grad]
    return [*frozen, *job.module.buffers()]


def _report(job: Fit, replica: Replica) -> list[Any]:
    setup.average_buffers(job.module, replica)
    metrics = job.recipe.metrics
    mine = metrics.state() if metrics.counted else None
    everybody = gather_tree(replica.collective, mine)
    metrics.reset()
    return everybody
