"""What is settled on every replica before a call of `fit`, `evaluate` or `predict` begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem.data.streams import RandomStreams
from stratagem.errors import NotDistributable
from stratagem.state.digest import digest
from stratagem.strategies import setup
from stratagem.strategies.replica import Replica
from stratagem.wire.tree import broadcast_tree, gather_tree


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


def align(module: nn.Module, replica: Replica) -> None:
    """The chief's weights on every replica. Collective."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if replica.count > 1 and is_lazy(tensor):
            raise NotDistributable(
                f"{name!r} has no shape yet (a lazy module); run one batch through the model "
                "before it is distributed."
            )
    setup.align(module, replica)


def align_state(optimizer: Optimizer, replica: Replica) -> None:
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


def move(module: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Module and optimizer state onto the replica's device."""
    if any(t.device != device for t in (*module.parameters(), *module.buffers())):
        module.to(device)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step" and value.device != device:
                state[key] = value.to(device)
