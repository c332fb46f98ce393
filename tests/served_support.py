"""Strategies with servers for tests to share, and the digits that they are to learn."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stratagem as sg

RULES: dict[str, Any] = {
    "synchronous": sg.Synchronous(),
    "spares": sg.Synchronous(spares=1),
    "asynchronous": sg.Asynchronous(staleness=[sg.ScaleDown(), sg.Drop(older_than=16)]),
    "bounded": sg.Asynchronous(bound=2),
    "buffered": sg.Asynchronous(buffer=2),
}
PLACES = ("central", "1 ps", "2 ps")
_made: list[Any] = []


@cache
def strategy(place: str, rule: str, workers: int = 2) -> Any:
    """One strategy for all tests that need nothing else."""
    updates = RULES[rule]
    if place == "central":
        made: Any = sg.CentralStorageStrategy([f"cpu:{i}" for i in range(workers)], updates=updates)
    else:
        made = sg.ParameterServerStrategy(
            sg.LocalCluster(workers=workers, ps=int(place[0])), updates=updates
        )
    _made.append(made)
    return made


def close_all() -> None:
    for each in _made:
        each.close()
    _made.clear()
    strategy.cache_clear()


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test digits, shuffled once."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    pixels, labels = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    return pixels[:1400], labels[:1400], pixels[1400:], labels[1400:]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def apart(a: nn.Module, b: nn.Module) -> float:
    """The largest difference between two modules' parameters."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)
