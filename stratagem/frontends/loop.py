"""The loop of `fit`, as every replica runs it."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.streams import mixed
from stratagem.frontends import loss_buffers, traits
from stratagem.frontends.alignment import align, align_state, move, own_streams
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.evaluation import Evaluation, evaluate_here
from stratagem.frontends.feeds import Feed, Portion, check_enough
from stratagem.frontends.followed import heed, news
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.replicated import Sliced
from stratagem.frontends.steps import Step, choose
from stratagem.frontends.tally import Tally
from stratagem.strategies import setup
from stratagem.strategies.replica import Replica, current_replica
from stratagem.strategies.settings import Settings
from stratagem.wire.tree import broadcast_tree


@dataclass
class Fit:
    """Everything that one call of `fit` needs on a replica."""

    module: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    settings: Settings
    feed: Feed
    validation: Feed | None
    epochs: range
    steps_per_epoch: int | None
    generation: int
    #: on the chief only
    callbacks: CallbackList = field(default_factory=CallbackList.none)
    #: whether callbacks act between steps, so that replicas must listen there too
    between_steps: bool = False
    #: the same around a validation, and between its batches
    around_tests: bool = False
    between_tests: bool = False
    #: whether callbacks read the optimizer's state at the end of an epoch, which servers then send
    wants_state: bool = False
    #: whether this is the call of a script, not what another process was sent of it
    by_itself: bool = True
    #: what the model's code looks up outside of it, for replicas of this machine
    names: list[Any] = field(default_factory=list)
    #: the epochs that end with a validation, and of how many batches
    validated: Collection[int] = range(sys.maxsize)
    validation_steps: int | None = None

    def for_followers(self) -> Fit:
        """The same without what only the chief has."""
        validation = self.validation
        return replace(
            self, callbacks=CallbackList.none(), feed=self.feed.without_source(),
            validation=validation and validation.without_source(),
            names=traits.names(self.module, self.recipe.loss), by_itself=False,
        )  # fmt: skip

    def test(self, feed: Feed) -> Evaluation:
        """A validation on the way, with weights that are alike already."""
        return Evaluation(
            self.module, self.recipe, feed, self.validation_steps, tried=True,
            callbacks=self.callbacks, between=self.between_tests,
        )  # fmt: skip


def fit(job: Fit) -> None:
    """Train; the module and the optimizer of every replica end alike."""
    replica = current_replica()
    move(job.module, job.optimizer, replica.device)
    job.recipe.metrics.to(replica.device)
    traits.adopt(job.module, job.recipe.loss, job.names)
    align(job.module, replica)
    loss_buffers.align(job.recipe.loss, replica)
    align_state(job.optimizer, replica)
    setup.roll_own_dice(replica, job.generation)
    # a later fit begins where the data's numbers are, and the model must not draw the same again
    seed = mixed(torch.initial_seed(), -1, job.generation) if job.generation else None
    with own_streams(replica, seed):
        job.feed.agree(replica)
        course = Course(job, replica)
        try:
            course.train()
            course.step.close()
        except BaseException:
            course.step.leave()
            raise
        job.callbacks.train_end()


class Course:
    """One training on one replica, from epoch to epoch; every method is collective."""

    def __init__(self, job: Fit, replica: Replica) -> None:
        self.job, self.replica = job, replica
        self._prepare()

    def _prepare(self) -> None:
        job, replica = self.job, self.replica
        self.step: Step = choose(job.module, job.optimizer, job.recipe, replica, job.settings)
        self._frozen = _frozen(job.module)
        job.callbacks.changes.in_common = isinstance(self.step, Sliced)

    def train(self) -> None:
        job, replica = self.job, self.replica
        changes = job.callbacks.changes
        changes.alone, changes.feed = replica.count == 1, job.feed
        # other workers may have been given other callbacks, or none
        mine = [job.between_steps, job.around_tests, job.between_tests]
        listening = broadcast_tree(replica.collective, mine)
        job.between_steps, job.around_tests, job.between_tests = map(bool, listening)
        job.callbacks.train_begin()
        self._listen()
        for epoch in job.epochs:
            if self._epoch(epoch):
                break

    def _epoch(self, epoch: int) -> bool:
        """One pass over the data; returns whether to stop."""
        job, replica = self.job, self.replica
        job.module.train()
        job.recipe.metrics.reset()
        job.callbacks.epoch_begin(epoch)
        self._listen()
        self._thaw()
        self.step.tally = tally = Tally()
        started = time.perf_counter()
        for number, portion, last in _numbered(job, replica, epoch):
            job.callbacks.batch_begin(number)
            if job.between_steps and self._listen():
                break
            if job.recipe.metrics:
                job.recipe.metrics.next_batch(portion, replica)
            self.step.take(portion, last)
            job.callbacks.batch_end(number, tally)
        if job.between_steps:
            self._listen()  # what the last batch's callbacks changed
        logs = {"loss": tally.mean(), **job.recipe.metrics.compute(replica)}
        seconds = max(time.perf_counter() - started, 1e-9)
        logs["examples_per_second"] = tally.examples / seconds
        setup.average_buffers(job.module, replica)
        loss_buffers.average(job.recipe.loss, replica)
        if job.validation is not None and epoch in job.validated:
            logs |= self._validate(job.validation)
        job.callbacks.epoch_end(epoch, logs)
        return self._listen()

    def _validate(self, feed: Feed) -> dict[str, float]:
        job = self.job
        if job.around_tests:
            job.callbacks.test_begin()
            self._listen()
        results = evaluate_here(job.test(feed), self.replica, self._listen)
        if job.around_tests:
            job.callbacks.test_end(results)
            self._listen()
        return {f"val_{name}": value for name, value in results.items()}

    def _thaw(self) -> None:
        """Others are trained from this epoch on, if a callback has frozen or unfrozen some."""
        if _frozen(self.job.module) != self._frozen and self.replica.count > 1:
            scaler = self.step.scaler
            self.step.close()
            align_state(self.job.optimizer, self.replica)
            self._prepare()
            self.step.scaler = scaler  # it goes on with the scale that it has found
            self.job.callbacks.changes.settle()

    def _listen(self) -> bool:
        """Follow what callbacks changed on the chief; returns whether to stop."""
        job, replica, step = self.job, self.replica, self.step
        if replica.count == 1:
            for group in job.optimizer.param_groups:
                group.update(_settings(group))
            return job.callbacks.stop
        mine, changes = None, job.callbacks.changes
        if replica.is_chief:
            changes.check_state()
            changes.check_data()
            changed = changes.weights_changed()
            if changed:
                step.take_back()
            mine = {
                "stop": job.callbacks.stop,
                "groups": [_settings(group) for group in job.optimizer.param_groups],
                **news(job, replica, changed),
            }
        told = broadcast_tree(replica.collective, mine)
        for group, settings in zip(job.optimizer.param_groups, told["groups"], strict=True):
            group.update(settings)
        step.follow_settings()
        heed(job, replica, told)
        return bool(told["stop"])


def _frozen(module: nn.Module) -> list[bool]:
    return [not p.requires_grad for p in module.parameters()]


def _numbered(job: Fit, replica: Replica, epoch: int) -> Iterator[tuple[int, Portion, bool]]:
    """Portions with their number, and whether each is the epoch's last."""
    limit = job.steps_per_epoch
    waiting: Portion | None = None
    number = drawn = 0
    for portion in job.feed.portions(replica, epoch):
        if waiting is not None:
            yield number, waiting, False
            number += 1
        waiting = portion
        drawn += 1
        if drawn == limit:
            break
    if waiting is not None:
        yield number, waiting, True
    check_enough(job.feed, drawn, limit, epoch)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    plain = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in group.items()
    }
    return {
        key: value for key, value in plain.items()
        if key != "params" and isinstance(value, bool | int | float | Tensor | tuple | list)
    }  # fmt: skip
