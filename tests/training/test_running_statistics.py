"""Running statistics in custom loops: the mean over replicas, whichever loader ends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import data

pytestmark = pytest.mark.timeout(60)

X, Y = data(40)
BATCH = 12


def norm_first() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))


def loader(rows: int = 36) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[:rows], Y[:rows]), BATCH)


def statistics(model: Any) -> Tensor:
    """Its first layer's, which depend on the data alone."""
    return torch.stack([model[0].running_mean, model[0].running_var]).clone()


def epochs(count: int, replicas: int) -> Tensor:
    """The mean of what plain torch comes to on each share of the same batches."""
    found = []
    for replica in range(replicas):
        norm, each = nn.BatchNorm1d(6), BATCH // replicas
        for _ in range(count):
            for start in range(0, 36, BATCH):
                norm(X[start + replica * each :][:each])
        found.append(statistics([norm]))
    return torch.stack(found).mean(0)


def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def beside_another(strategy: sg.Strategy) -> Tensor:
    """Of two models one has the loader, as in a GAN."""
    model, other = norm_first(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    model, optimizer, _ = strategy.prepare(model, optimizer)
    other, others, batches = strategy.prepare(other, others, loader())
    for _ in range(2):
        for x, _y in batches:
            others.zero_grad()
            optimizer.zero_grad()
            other(model(x)).square().mean().backward()
            others.step()
            optimizer.step()
    return statistics(model)


def loader_by_itself(strategy: sg.Strategy) -> Tensor:
    model = norm_first()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = strategy.prepare(model, optimizer)
    batches = strategy.prepare(loader())
    for _ in range(2):
        train(model, optimizer, batches)
    return statistics(model)


def prepared_again(strategy: sg.Strategy) -> Tensor:
    """Then with a loader, and a model is gone on one replica only."""
    model, gone = norm_first(), norm_first()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.prepare(gone, torch.optim.SGD(gone.parameters(), lr=0.1))
    strategy.prepare(model, optimizer)
    kept = gone if sg.current_replica().is_chief else None
    del gone
    gc.collect()
    model, optimizer, batches = strategy.prepare(model, optimizer, loader())
    for _ in range(2):
        train(model, optimizer, batches)
    assert kept is None or bool((kept[0].running_mean == 0).all())  # type: ignore[index]
    return statistics(model)


@pytest.mark.parametrize("loop", [beside_another, loader_by_itself, prepared_again])
def test_the_mean_over_replicas(
    two: sg.Strategy, three: sg.Strategy, loop: Callable[[sg.Strategy], Tensor]
) -> None:
    for count, strategy in ((2, two), (3, three)):
        found = strategy.run(loop, strategy)
        expected = epochs(2, count)
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-6)


def frozen_norm(strategy: sg.Strategy | None) -> Tensor:
    """A validation between forward and backward, which need the statistics unwritten."""
    model = norm_first().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches: Any = [(X[:BATCH], Y[:BATCH])]
    test: Any = [X]
    if strategy is not None:
        model, optimizer, _ = strategy.prepare(model, optimizer)
        batches, test = strategy.prepare(loader(BATCH)), strategy.prepare(loader())
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        for _ in test:
            model.eval()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_statistics_that_are_alike_are_not_written(two: sg.Strategy) -> None:
    alone = frozen_norm(None)
    for each in two.run(frozen_norm, two):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-6)
