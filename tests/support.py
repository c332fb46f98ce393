"""What several tests need: a model trained by hand on one device, and distances between results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import stratagem as sg


def cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def strategy(count: int, **options: Any) -> sg.MirroredStrategy:
    return sg.MirroredStrategy(cpus(count), **options)


def data(
    rows: int = 331, features: int = 6, classes: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=dice)
    return x, torch.randint(0, classes, (rows,), generator=dice)


def mlp(features: int = 6, classes: int = 4) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, classes))


def by_hand(
    module: nn.Module,
    make_optimizer: Callable[[Any], Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    batch: int,
    epochs: int = 2,
    before_step: Callable[[nn.Module], object] = lambda module: None,
    accumulate: int = 1,
) -> nn.Module:
    """The loop that everybody writes: one device, no library."""
    module = copy.deepcopy(module)
    optimizer = make_optimizer(module.parameters())
    module.train()
    for _ in range(epochs):
        starts = range(0, len(x), batch)
        for number, start in enumerate(starts):
            rows = slice(start, start + batch)
            (loss(module(x[rows]), y[rows]) / accumulate).backward()
            if (number + 1) % accumulate == 0 or number + 1 == len(starts):
                before_step(module)
                optimizer.step()
                optimizer.zero_grad()
    return module


def distance(a: nn.Module, b: nn.Module, buffers: bool = True) -> float:
    """The largest difference between two modules' weights."""
    ours = dict(a.state_dict() if buffers else a.named_parameters())
    theirs = dict(b.state_dict() if buffers else b.named_parameters())
    assert ours.keys() == theirs.keys()
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


def moved(a: nn.Module, b: nn.Module) -> bool:
    """Whether training changed anything: an unchanged model would equal an unchanged model."""
    return distance(a, b) > 1e-3


def closest(values: Sequence[float], others: Sequence[float]) -> float:
    assert len(values) == len(others)
    return max((abs(a - b) for a, b in zip(values, others, strict=True)), default=0.0)


#: strategies that give the answer of one device, from it on
IN_STEP = ("one", "shared_memory", "ring", "central", "servers")


def in_step(kind: str, replicas: int) -> sg.Strategy:
    """One of those."""
    if kind == "central":
        return sg.CentralStorageStrategy(cpus(2), updates=sg.Synchronous())
    if kind == "servers":
        return sg.ParameterServerStrategy(
            sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous()
        )
    return strategy(1) if kind == "one" else strategy(replicas, cross_device_ops=kind)
