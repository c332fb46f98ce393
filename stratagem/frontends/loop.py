"""The loops of `fit`, `evaluate` and `predict`, as every replica runs them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem.data.streams import RandomStreams, mixed
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends import loss_buffers, outputs, traits
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.feeds import Feed, Portion, check_enough
from stratagem.frontends.meter import Meter
from stratagem.frontends.proof import Proof
from stratagem.frontends.steps import Recipe, Sliced, Solo, Step, Tally, choose
from stratagem.state.digest import digest
from stratagem.strategies import setup
from stratagem.strategies.replica import Replica, current_replica
from stratagem.strategies.settings import Settings
from stratagem.wire.tree import broadcast_tree, gather_tree

#: follows what callbacks changed on the chief
Listen = Callable[[], Any]


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
    _move(job.module, job.optimizer, replica.device)
    job.recipe.metrics.to(replica.device)
    traits.adopt(job.module, job.recipe.loss, job.names)
    _align(job.module, replica)
    loss_buffers.align(job.recipe.loss, replica)
    _align_state(job.optimizer, replica)
    setup.roll_own_dice(replica, job.generation)
    # a later fit begins where the data's numbers are, and the model must not draw the same again
    seed = mixed(torch.initial_seed(), -1, job.generation) if job.generation else None
    with _own_streams(replica, seed):
        job.feed.agree(replica)
        course = Course(job, replica)
        try:
            course.train()
            course.step.close()
        except BaseException:
            course.step.leave()
            raise
        job.callbacks.train_end()


@contextmanager
def _own_streams(
    replica: Replica, seed: int | None = None, *, renew: bool = False
) -> Iterator[None]:
    """On the chief: what the model draws, and how much, shall not decide how data is shuffled."""
    if not replica.is_chief:
        yield
        return
    around, replica.streams = replica.streams, (streams := RandomStreams(seed))
    try:
        yield
    finally:
        streams.end(renew=renew)
        replica.streams = around  # on one device, callbacks may evaluate


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
            _align_state(self.job.optimizer, self.replica)
            self._prepare()
            self.step.scaler = scaler  # it goes on with the scale that it has found
            self.job.callbacks.changes.settle()

    def _listen(self) -> bool:
        """Follow what callbacks changed on the chief; returns whether to stop."""
        job, replica, step = self.job, self.replica, self.step
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
                **_news(job, replica, changed),
            }
        told = broadcast_tree(replica.collective, mine)
        for group, settings in zip(job.optimizer.param_groups, told["groups"], strict=True):
            group.update(settings)
        step.follow_settings()
        _heed(job, replica, told)
        return bool(told["stop"])


def _news(job: Fit | Evaluation, replica: Replica, changed: bool) -> dict[str, Any]:
    """On the chief: what its callbacks have made of the model."""
    state = [*job.module.parameters(), *job.module.buffers()]
    return {
        "weights": [t.detach() for t in state] if changed and replica.count > 1 else None,
        "traits": job.callbacks.changes.new_traits(),
    }


def _heed(job: Fit | Evaluation, replica: Replica, told: dict[str, Any]) -> None:
    """Have the model as the chief's callbacks have made it."""
    if told["weights"] is not None and not replica.is_chief:
        with torch.no_grad():
            state = [*job.module.parameters(), *job.module.buffers()]
            for tensor, value in zip(state, told["weights"], strict=True):
                tensor.copy_(value)
    if told["traits"] and not replica.is_chief:
        traits.adopt(job.module, job.recipe.loss, told["traits"], job.feed.dataset)
    if told["weights"] is not None or told["traits"]:
        job.callbacks.changes.settle()


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


@dataclass
class Evaluation:
    """Everything that `evaluate` and `predict` need on a replica."""

    module: nn.Module
    recipe: Recipe
    feed: Feed
    steps: int | None = None
    #: whether the loss has been tried: `fit` has done so when it validates
    tried: bool = False
    #: on the chief only
    meter: Meter | None = None
    callbacks: CallbackList = field(default_factory=CallbackList.none)
    #: whether callbacks act between batches, so that replicas must listen there
    between: bool = False
    #: as in `Fit`
    names: list[Any] = field(default_factory=list)

    def for_followers(self) -> Evaluation:
        return replace(
            self, feed=self.feed.without_source(), meter=None, callbacks=CallbackList.none(),
            names=traits.names(self.module, self.recipe.loss),
        )  # fmt: skip

    def portions(self, replica: Replica) -> Iterator[Portion]:
        examples = 0
        for number, portion in enumerate(islice(self.feed.portions(replica, 0), self.steps), 1):
            yield portion
            examples += portion.total
            if self.meter is not None:
                self.meter.advance(number, examples)


def evaluate(job: Evaluation) -> dict[str, float]:
    """Loss and metrics over every example once, the same on every replica."""
    replica = current_replica()
    job.module.to(replica.device)
    job.recipe.metrics.to(replica.device)
    traits.adopt(job.module, job.recipe.loss, job.names)
    _align(job.module, replica)
    loss_buffers.align(job.recipe.loss, replica)
    with _own_streams(replica, renew=True):
        return evaluate_here(job, replica, _listener(job, replica))


def _listener(job: Evaluation, replica: Replica) -> Listen:
    """What follows, on every replica, what callbacks changed between two batches. Collective."""
    # other workers may have been given other callbacks, or none
    job.between = bool(broadcast_tree(replica.collective, job.between))
    changes = job.callbacks.changes
    changes.alone, changes.feed = replica.count == 1, job.feed

    def listen() -> None:
        mine = None
        if replica.is_chief:
            changes.check_data()
            mine = _news(job, replica, changes.weights_changed())
        _heed(job, replica, broadcast_tree(replica.collective, mine))

    return listen


@torch.no_grad()
def evaluate_here(job: Evaluation, replica: Replica, listen: Listen) -> dict[str, float]:
    """The same, with weights that are alike already."""
    metrics = job.recipe.metrics
    job.module.eval()
    metrics.reset()
    runner = Solo(job.module, None, job.recipe, replica)
    proof = None if job.tried else Proof(job.recipe.loss, replica)
    if job.between:
        job.callbacks.changes.settle()
    sums, tally = [], Tally()
    for number, portion in enumerate(job.portions(replica)):
        if job.between:
            job.callbacks.test_batch_begin(number)
            listen()
        sums.append([*_losses(runner, portion, proof), float(portion.total)])
        if job.between:
            loss = _mean_loss(sums[-1:], replica)
            tally.add(torch.tensor(loss, dtype=torch.float64), portion.total)
            job.callbacks.test_batch_end(number, tally)
    if job.between:
        listen()  # what the last batch's callbacks changed
    if not sums:
        raise UsageError(
            "the data to evaluate (or validation_data) has no batch: it is empty, or a generator "
            "that an earlier pass has used up; give something that can be iterated again: arrays, "
            "a DataLoader, a list of batches."
        )
    results = {"loss": _mean_loss(sums, replica), **metrics.compute(replica)}
    metrics.reset()
    return results


def _losses(runner: Solo, portion: Portion, proof: Proof | None) -> tuple[float, float]:
    """Numerator and denominator of this share's loss; metrics take it in."""
    recipe = runner.recipe
    if recipe.metrics:
        recipe.metrics.next_batch(portion, runner.replica)
    if portion.examples == 0:
        return 0.0, 0.0
    with runner.autocast():
        output, y, weight = runner.forward(portion)
        numerator, denominator = recipe.loss.terms(output, y, weight, portion.examples)
        if proof is not None and proof.open:
            proof.settle(portion, output, y, numerator)
    if recipe.metrics:
        recipe.metrics.update(output, y)
    if denominator is None:
        denominator = portion.examples / portion.total
    return float(numerator), float(denominator)


def _mean_loss(sums: list[list[float]], replica: Replica) -> float:
    """Each global batch's loss, weighted by its examples, as one device averages it."""
    everybody = gather_tree(replica.collective, torch.tensor(sums, dtype=torch.float64))
    added = torch.stack(everybody).sum(0)
    totals = torch.tensor([row[2] for row in sums], dtype=torch.float64)
    return float((added[:, 0] / added[:, 1] * totals).sum() / totals.sum())


@torch.no_grad()
def predict(job: Evaluation) -> Any:
    """Outputs for every example, in order, on the CPU."""
    replica = current_replica()
    job.module.to(replica.device)
    traits.adopt(job.module, job.recipe.loss, job.names)
    _align(job.module, replica)
    job.module.eval()
    listen = _listener(job, replica)
    with _own_streams(replica, renew=True):
        mine = _own_outputs(job, replica, listen)
    everybody = gather_tree(replica.collective, mine)
    return _in_one([part for batch in zip(*everybody, strict=True) for part in batch], replica)


def _in_one(parts: list[Any], replica: Replica) -> Any:
    """Outputs of shares, in order, as that of the whole."""
    ordered = [part for part in parts if part is not None]
    found = [output for output, _ in ordered]
    if replica.count > 1 and found:
        outputs.check_rows(found, [examples for _, examples in ordered])
    return outputs.joined(found)


def _own_outputs(job: Evaluation, replica: Replica, listen: Listen) -> list[Any]:
    """Outputs for this replica's shares, and how many rows they are of; None for empty ones."""
    runner = Solo(job.module, None, job.recipe, replica)
    if job.between:
        job.callbacks.changes.settle()
    mine: list[Any] = []
    for number, portion in enumerate(job.portions(replica)):
        if job.between:
            job.callbacks.predict_batch_begin(number)
            listen()
        mine.append(_own_output(runner, portion))
        if number == 0 and mine[0] is not None and replica.count > 1:  # before the others are made
            outputs.check_rows([mine[0][0]], [portion.examples])
        if job.between:
            everybody = gather_tree(replica.collective, mine[-1])
            job.callbacks.predict_batch_end(number, _in_one(everybody, replica))
    if job.between:
        listen()
    return mine


def _own_output(runner: Solo, portion: Portion) -> Any:
    if portion.examples == 0:
        return None
    with runner.autocast():
        return [outputs.on_cpu(runner.forward(portion)[0]), portion.examples]


def _align(module: nn.Module, replica: Replica) -> None:
    """The chief's weights on every replica. Collective."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if replica.count > 1 and is_lazy(tensor):
            raise NotDistributable(
                f"{name!r} has no shape yet (a lazy module); run one batch through the model "
                "before it is distributed."
            )
    setup.align(module, replica)


def _align_state(optimizer: Optimizer, replica: Replica) -> None:
    """The chief's state of the optimizer on every replica, where another process has none, or
    another one: it may not have loaded what the chief has. Collective."""
    if replica.count == 1:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in params]
    looks = [
        {name: digest(v) if isinstance(v, Tensor) else v for name, v in state.items()}
        for state in states
    ]
    everybody = gather_tree(replica.collective, looks)
    if all(look == everybody[0] for look in everybody):
        return
    told = broadcast_tree(replica.collective, [dict(state) for state in states])
    if replica.is_chief:
        return
    for param, state in zip(params, told, strict=True):
        optimizer.state[param] = {
            name: v.to(param.device) if isinstance(v, Tensor) and v.shape == param.shape else v
            for name, v in state.items()
        }


def _move(module: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Module and optimizer state onto the replica's device."""
    module.to(device)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step" and value.device != device:
                state[key] = value.to(device)
