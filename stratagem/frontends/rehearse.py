"""The first batch of a `fit`, handed over to whoever plans instead of training."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shard import count_rows
from stratagem.errors import UsageError
from stratagem.frontends import loop, served
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.callbacks import History
from stratagem.frontends.feeds import ArrayFeed, Feed, Portion
from stratagem.frontends.metrics import MetricSet
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.solo import Solo
from stratagem.strategies import rehearsal
from stratagem.strategies.devices import place
from stratagem.strategies.replica import Replica, alone, current_replica
from stratagem.strategies.strategy import Strategy

_EPOCHS = 4  # the first of them warms up


def rehearse(
    module: nn.Module, optimizer: Optimizer, recipe: Recipe, feed: Feed, strategy: Strategy
) -> NoReturn:
    """Hand over what `fit` would do with its first batch."""
    here = alone(current_replica())
    portion = next(iter(feed.portions(here, 0)), None)
    if portion is None:
        raise UsageError("the data to fit has no batch: it is empty; there is nothing to plan.")
    device = place(strategy.team.devices[0])
    here = Replica(0, 1, device, here.name, here.collective, here.membership)
    stage = _Stage(module, optimizer, recipe, Solo(module, optimizer, recipe, here))
    rehearsal.hand_over(
        rehearsal.Rehearsal(
            module, (portion.x, portion.y, portion.weight), stage.loss, stage.solo.update,
            optimizer, strategy.num_replicas_in_sync, str(device), stage.train,
        )
    )  # fmt: skip


@dataclass
class _Understudy:
    """What callbacks see of a model."""

    module: nn.Module
    optimizer: Optimizer
    history: History
    stop_training: bool = False
    bring_home: Any = None


@dataclass
class _Stage:
    """What a step consists of."""

    module: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    solo: Solo

    def __reduce__(self) -> tuple[Any, ...]:
        """To other replicas, without this one's place among them."""
        return _stage_here, (self.module, self.optimizer, self.recipe)

    def loss(self, batch: Any) -> Tensor:
        x, y, weight = batch
        with self.solo.autocast():
            output, target, given = self.solo.forward(Portion(x, y, weight, 0, 0))
            return self.recipe.loss.mean(output, target, given)

    def train(self, strategy: Strategy, batch: Any, steps: int) -> float:
        """Examples a second of a copy, on the same global batch over and over."""
        size = count_rows(batch)
        x, y, weight = (_repeated(part, torch.arange(size * steps) % size) for part in batch)
        history = History()
        copy = _Understudy(*deepcopy((self.module, self.optimizer)), history)
        job = loop.Fit(
            copy.module, copy.optimizer, self._recipe(), strategy.settings,
            ArrayFeed(x, y, weight, size), None, range(_EPOCHS), None, 0,
            CallbackList([history], copy, {"epochs": _EPOCHS, "steps": steps}),
        )  # fmt: skip
        team = strategy.team
        sent = (job.for_followers(),) if len(team.devices) > 1 else None
        team.call(served.fit if strategy.served else loop.fit, (job,), sent)
        return median(history.history["examples_per_second"][1:])

    def _recipe(self) -> Recipe:
        """Without metrics, which have their own price."""
        return Recipe(
            self.recipe.loss, MetricSet(None), self.recipe.clip_norm, self.recipe.clip_value,
            autocast=self.recipe.autocast,
        )  # fmt: skip


def _stage_here(module: nn.Module, optimizer: Optimizer, recipe: Recipe) -> _Stage:
    solo = Solo(module, optimizer, recipe, alone(current_replica()))
    return _Stage(module, optimizer, recipe, solo)


def _repeated(tree: Any, chosen: Tensor) -> Any:
    if isinstance(tree, Tensor):
        return tree[chosen]
    if isinstance(tree, dict):
        return {key: _repeated(value, chosen) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(_repeated(value, chosen) for value in tree)
    return tree
