"""Which form of step the replicas of a strategy use."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.apart import Apart
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sharded_steps import (
    FullySharded,
    SharedSet,
    refuse_undivided,
    refuse_unshared,
)
from stratagem.frontends.steps import OneDevice, Replicated, Searching, Sliced, Step
from stratagem.state.sliced import can_slice
from stratagem.training.lossy_wire import check_optimizer, refuse_half
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings


def choose(
    module: nn.Module, optimizer: Optimizer, recipe: Recipe, replica: Replica, settings: Settings
) -> Step:
    """The form of step that these replicas can use. Collective."""
    searches = isinstance(optimizer, torch.optim.LBFGS)
    if searches and (recipe.accumulate > 1 or recipe.autocast is torch.float16):
        raise UsageError(
            'LBFGS evaluates the loss several times a step, so accumulate and precision="float16" '
            "cannot go with it; leave them out, or use another optimizer."
        )
    if settings.elastic and settings.committer is not None and settings.sync is None:
        raise NotDistributable(
            "elastic=True does a step again when a replica dies, which a committer of your own may "
            "not take; use one of the two."
        )
    check_optimizer(settings, optimizer, replica)
    if recipe.autocast is torch.float16 and replica.count > 1:
        refuse_half(settings)
    if replica.count == 1:
        return (Searching if searches else OneDevice)(module, optimizer, recipe, replica)
    if searches:
        raise NotDistributable(
            "LBFGS evaluates the loss several times a step, which replicas cannot follow; use "
            "another optimizer, or one device."
        )
    if settings.sharded:
        return _sharded(module, optimizer, recipe, replica, settings)
    plain = settings.wire in (None, "float32") and settings.op != "auto" and not settings.committer
    params = [p for p in module.parameters() if p.requires_grad]
    half = recipe.autocast is torch.float16
    if (
        plain
        and replica.collective.shares_memory
        and not half
        and params
        and can_slice(optimizer, params)
    ):
        return Sliced(module, optimizer, recipe, replica, settings)
    form = Replicated if settings.sync is None else Apart
    return form(module, optimizer, recipe, replica, settings)


def _sharded(
    module: nn.Module, optimizer: Optimizer, recipe: Recipe, replica: Replica, settings: Settings
) -> Step:
    """One set in shared memory on the CPUs of a machine; elsewhere torch's fully_shard."""
    if replica.collective.shares_memory:
        refuse_unshared(module, optimizer, recipe)
        return SharedSet(module, optimizer, recipe, replica, settings)
    refuse_undivided(module, optimizer, recipe, replica)
    return FullySharded(module, optimizer, recipe, replica, settings)
