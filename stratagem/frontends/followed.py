"""What callbacks make of the model on the chief, on every replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from stratagem.frontends import traits
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.feeds import Feed
from stratagem.frontends.recipe import Recipe
from stratagem.strategies.replica import Replica

#: follows what callbacks changed on the chief
Listen = Callable[[], Any]


class Job(Protocol):
    """What a call works on."""

    module: nn.Module
    recipe: Recipe
    feed: Feed
    callbacks: CallbackList


def news(job: Job, replica: Replica, changed: bool) -> dict[str, Any]:
    """On the chief: what its callbacks have made of the model."""
    state = [*job.module.parameters(), *job.module.buffers()]
    return {
        "weights": [t.detach() for t in state] if changed and replica.count > 1 else None,
        "traits": job.callbacks.changes.new_traits(),
    }


def heed(job: Job, replica: Replica, told: dict[str, Any]) -> None:
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
