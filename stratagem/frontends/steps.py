"""One training step on one replica, in forms that give the same result.

    Solo         one replica: the loop that one would write by hand              solo.py
    Searching    one replica with LBFGS, which asks for the loss several times a step
    Replicated   gradients all-reduced, every replica updates its own copy       replicated.py
    Sliced       CPU replicas of one machine: parameters shared, each updates its slice
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.feeds import Portion
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.replicated import Replicated, Sliced
from stratagem.frontends.solo import Searching, Solo
from stratagem.frontends.tally import Tally
from stratagem.state.sliced import can_slice
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings
from stratagem.wire.shared_memory import SharedMemoryCollective


class Step(Protocol):
    """What the loop asks of any of them."""

    tally: Tally
    #: with precision="float16"
    scaler: Any

    def take(self, portion: Portion, last: bool) -> None:
        """Train on one share; `last` means that accumulated gradients must be applied now."""

    def follow_settings(self) -> None:
        """The optimizer's settings have changed."""

    def take_back(self) -> None:
        """Somebody has changed weights, or given them other memory."""

    def close(self) -> None:
        """Take hooks and shared memory away. Collective."""

    def leave(self) -> None:
        """Take hooks away after a failure, alone; memory that was shared stays where it is."""


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
    if replica.count == 1:
        return (Searching if searches else Solo)(module, optimizer, recipe, replica)
    if searches:
        raise NotDistributable(
            "LBFGS evaluates the loss several times a step, which replicas cannot follow; use "
            "another optimizer, or one device."
        )
    plain = settings.wire in (None, "float32") and settings.op != "auto"
    shared = isinstance(replica.collective, SharedMemoryCollective)
    params = [p for p in module.parameters() if p.requires_grad]
    half = recipe.autocast is torch.float16
    if plain and shared and not half and params and can_slice(optimizer, params):
        return Sliced(module, optimizer, recipe, replica, settings)
    return Replicated(module, optimizer, recipe, replica, settings)
