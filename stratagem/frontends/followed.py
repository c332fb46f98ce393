"""What callbacks make of the model on the chief, on every replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stratagem.frontends import loss_buffers, traits
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
    held = loss_buffers.weights(job.recipe.loss) if job.callbacks.changes.loss_changed() else None
    return {
        "weights": [t.detach() for t in state] if changed and replica.count > 1 else None,
        "loss": None if held is None else [t.detach() for t in held],
        "traits": job.callbacks.changes.new_traits(),
    }


def heed(job: Job, replica: Replica, told: dict[str, Any]) -> None:
    """Have the model as the chief's callbacks have made it."""
    if not replica.is_chief:
        _take([*job.module.parameters(), *job.module.buffers()], told["weights"])
        _take(loss_buffers.weights(job.recipe.loss), told["loss"])
    if told["traits"] and not replica.is_chief:
        traits.adopt(job.module, job.recipe.loss, told["traits"], job.feed.dataset)
    if told["weights"] is not None or told["loss"] is not None or told["traits"]:
        job.callbacks.changes.settle()


@torch.no_grad()
def _take(mine: Sequence[Tensor], told: Sequence[Tensor] | None) -> None:
    if told is not None:
        for tensor, value in zip(mine, told, strict=True):
            tensor.copy_(value)
