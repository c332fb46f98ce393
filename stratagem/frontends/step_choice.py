"""Which form of step the replicas of a strategy use."""

from __future__ import annotations

import torch

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.adapter import Training
from stratagem.frontends.apart import Apart
from stratagem.frontends.sharded_steps import sharded_step
from stratagem.frontends.steps import OneDevice, Replicated, Searching, Sliced
from stratagem.state.sliced import can_slice
from stratagem.training.lossy_wire import check_optimizer, refuse_scaler
from stratagem.training.replica import Replica


def choose(training: Training, replica: Replica) -> OneDevice:
    """The form of step that these replicas can use. Collective."""
    module, optimizer, recipe, settings = training
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
        refuse_scaler(settings, 'precision="float16"')
    if replica.count == 1:
        return (Searching if searches else OneDevice)(training, replica)
    if searches:
        raise NotDistributable(sentence("replicas", "LBFGS"))
    if settings.sharded:
        return sharded_step(training, replica)
    plain = settings.wire in (None, "float32") and settings.op != "auto" and not settings.committer
    params = [p for p in module.parameters() if p.requires_grad]
    shared = plain and replica.collective.shares_memory and recipe.autocast is not torch.float16
    if shared and params and can_slice(optimizer, params):
        return Sliced(training, replica)
    return (Replicated if settings.sync is None else Apart)(training, replica)
