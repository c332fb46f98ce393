"""What is settled on every replica before a call of `fit`, `evaluate` or `predict` begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem.data.streams import RandomStreams
from stratagem.errors import NotDistributable
from stratagem.training import setup
from stratagem.training.replica import Replica


@contextmanager
def own_streams(
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


def align(module: nn.Module, replica: Replica, *, values: bool = True) -> None:
    """The chief's weights on every replica. Collective. `values`: unless they are about to come
    some other way."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if replica.count > 1 and is_lazy(tensor):
            raise NotDistributable(
                f"{name!r} has no shape yet (a lazy module); run one batch through the model "
                "before it is distributed."
            )
    setup.align(module, replica, values=values)


def align_loss(loss: Any, replica: Replica) -> None:
    """The same for a loss that is a module, and not torch's. Collective."""
    if loss.own and isinstance(loss.function, nn.Module):
        setup.align(loss.function, replica)


def move(module: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Module and optimizer state onto the replica's device."""
    if any(t.device != device for t in (*module.parameters(), *module.buffers())):
        module.to(device)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step" and value.device != device:
                state[key] = value.to(device)
