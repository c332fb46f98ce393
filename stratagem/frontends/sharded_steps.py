"""Steps of a sharded strategy.

SharedSet    CPU replicas of one machine: parameters, gradients and state once, in shared memory
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.errors import NotDistributable
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sources import Portion
from stratagem.frontends.steps import Sliced
from stratagem.state.sharded_update import ShardedUpdate
from stratagem.state.sliced import can_slice
from stratagem.training.gradient_placement import FactoredGradients
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings
from stratagem.training.sharded_exchange import ShardedExchange


class SharedSet(Sliced):
    """As `Sliced`, with one set of gradients, to which backward adds as it goes."""

    placed_gradients = FactoredGradients
    sliced_update = ShardedUpdate
    committer: ShardedExchange

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        replica: Replica,
        settings: Settings,
    ) -> None:
        made = replace(settings, committer=ShardedExchange)
        super().__init__(module, optimizer, recipe, replica, made)

    def _gradients(self, portion: Portion) -> tuple[Any, Any]:
        self.committer.armed = True  # what would be accumulated here is added to the sum at once
        if self._waiting == 1:
            self.committer.begin_step()
        terms = super()._gradients(portion)
        self.committer.end_pass()
        return terms


def refuse_unshared(module: nn.Module, optimizer: Optimizer, recipe: Recipe) -> None:
    """Refuse what cannot be trained in slices of one set."""
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if recipe.autocast is torch.float16:
        raise NotDistributable(
            'precision="float16" unscales whole gradients, of which a replica of ShardedStrategy '
            'has a slice; use precision="bfloat16", or MirroredStrategy.'
        )
    for name, param in params.items():
        if param.dtype is not torch.float32:
            raise NotDistributable(
                f"parameter {name!r} is {param.dtype}, and CPU replicas of ShardedStrategy share "
                "float32 parameters; use module.float(), or MirroredStrategy."
            )
    if not can_slice(optimizer, list(params.values())):
        raise NotDistributable(
            f"{type(optimizer).__name__} may look at whole parameters, of which a replica of "
            "ShardedStrategy updates a slice; use SGD, AdamW or another of torch's optimizers that "
            "treat each element by itself, or MirroredStrategy."
        )
