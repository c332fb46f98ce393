"""Hands the first batch of a `fit` to `stratagem plan`, instead of training."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shares import count_rows
from stratagem.errors import UsageError
from stratagem.frontends import staged
from stratagem.frontends.adapter import TorchAdapter
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.callbacks import History
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.metrics import MetricSet
from stratagem.frontends.model_calls import fit
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sharded_steps import refuse_unshared
from stratagem.frontends.sources import ArraySource, Portion, Source, rows_at
from stratagem.state.sliced import can_slice
from stratagem.strategies.strategy import Strategy
from stratagem.training import dry_run
from stratagem.training.devices import place
from stratagem.training.replica import Replica, alone, current_replica
from stratagem.training.settings import Pipeline, Settings

_EPOCHS = 2  # the first one is the warm-up


def rehearse(
    module: nn.Module, optimizer: Optimizer, recipe: Recipe, source: Source, strategy: Strategy
) -> NoReturn:
    """Hand over a dry run of `fit`: the model, its first batch and its training step."""
    here = alone(current_replica())
    portion = next(iter(source.portions(here, 0)), None)
    if portion is None:
        raise UsageError("the data to fit has no batch: it is empty; there is nothing to plan.")
    device = place(strategy.replica_group.devices[0])
    here = Replica(0, 1, device, here.name, here.collective, here.membership)
    stage = _StepParts(module, optimizer, recipe, TorchAdapter(module, optimizer, recipe, here))
    settings = Settings(pipeline=Pipeline())
    cast = recipe.autocast  # a layer that is measured again casts its weights again
    own = partial(torch.autocast, device.type, cast, cache_enabled=False)
    trained = [p for p in module.parameters() if p.requires_grad]
    split = Fit(module, optimizer, recipe, settings, source, None, range(1), None, 0)
    dry_run.hand_over(
        dry_run.DryRun(
            module,
            (portion.x, portion.y, portion.weight),
            stage.loss,
            stage.adapter.update,
            optimizer,
            strategy.num_replicas_in_sync,
            str(device),
            stage.train,
            inputs=lambda batch: batch[0],
            arguments=staged.in_order,
            autocast=nullcontext if cast is None else own,
            unpiped=dry_run.refusal(partial(staged.check, split, 2)),
            unsharded=dry_run.refusal(partial(refuse_unshared, module, optimizer, recipe)),
            one_set=cast is not torch.float16 and can_slice(optimizer, trained),
        )
    )


@dataclass
class _PlannedModel:
    """The attributes of a model that callbacks use."""

    module: nn.Module
    optimizer: Optimizer
    history: History
    stop_training: bool = False
    bring_home: Any = None


@dataclass
class _StepParts:
    """A training step and its parts: module, optimizer, recipe and adapter."""

    module: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    adapter: TorchAdapter

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the adapter, which belongs to this replica."""
        return _step_parts, (self.module, self.optimizer, self.recipe)

    def loss(self, batch: Any) -> Tensor:
        x, y, weight = batch
        with self.adapter.autocast():
            output, target, given = self.adapter.forward(Portion(x, y, weight, 0, 0))
            return self.recipe.loss.mean(output, target, given)

    def train(self, strategy: Strategy, batch: Any, steps: int) -> float:
        """Train a copy on the same global batch repeatedly, and return examples per second."""
        size = count_rows(batch)
        x, y, weight = (rows_at(part, torch.arange(size * steps) % size) for part in batch)
        history = History()
        copy = _PlannedModel(*deepcopy((self.module, self.optimizer)), history)
        job = Fit(
            copy.module,
            copy.optimizer,
            self._recipe(),
            strategy.settings,
            ArraySource(x, y, weight, size),
            None,
            range(_EPOCHS),
            None,
            0,
            CallbackList([history], copy, {"epochs": _EPOCHS, "steps": steps}),
        )
        replica_group = strategy.replica_group
        sent = (job.for_followers(),) if len(replica_group.devices) > 1 else None
        replica_group.call(fit, (job,), sent)
        found: float = history.history["examples_per_second"][-1]
        return found

    def _recipe(self) -> Recipe:
        """Return the recipe without metrics, whose time is not part of the step."""
        return Recipe(
            self.recipe.loss,
            MetricSet(None),
            self.recipe.clip_norm,
            self.recipe.clip_value,
            autocast=self.recipe.autocast,
        )


def _step_parts(module: nn.Module, optimizer: Optimizer, recipe: Recipe) -> _StepParts:
    adapter = TorchAdapter(module, optimizer, recipe, alone(current_replica()))
    return _StepParts(module, optimizer, recipe, adapter)
