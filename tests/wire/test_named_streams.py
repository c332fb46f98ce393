"""Batches of NamedTuples that one process reads for all replicas stay NamedTuples."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import stratagem as sg
from tests.support import by_hand, data, distance, moved

pytestmark = pytest.mark.timeout(60)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for x, y in zip(*data(36), strict=True):
            yield Pair(x, 2 * x), y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, pair: Pair) -> Tensor:
        assert isinstance(pair, Pair)
        return self.layer(pair.a + pair.b)  # type: ignore[no-any-return]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def reference(net: Net) -> nn.Module:
    """A plain torch loop over the same sums."""
    x, y = data(36)
    inner = by_hand(net.layer, sgd, F.cross_entropy, 3 * x, y, batch=8, epochs=1)
    assert moved(inner, net.layer)
    return inner


@pytest.fixture(scope="module")
def served() -> Iterator[sg.ParameterServerStrategy]:
    cluster = sg.LocalCluster(workers=2, ps=1)
    with contextlib.closing(sg.ParameterServerStrategy(cluster, updates=sg.Synchronous())) as made:
        yield made


@pytest.mark.parametrize("kind", ["two", "served"])
def test_fit(kind: str, request: pytest.FixtureRequest) -> None:
    net = Net()
    model = sg.Model(copy.deepcopy(net), request.getfixturevalue(kind))
    model.compile(sgd, "cross_entropy")
    model.fit(DataLoader(Rows(), 8), verbose=0)
    assert distance(reference(net), model.module.layer) < 1e-6


def test_a_loop_of_ones_own(two: sg.MirroredStrategy) -> None:
    def train() -> list[Tensor]:
        net = Net()
        model, optimizer, loader = two.prepare(net, sgd(net.parameters()), DataLoader(Rows(), 8))
        for pair, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(pair), y).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    expected = list(reference(Net()).parameters())
    for parameters in two.run(train):
        for there, here in zip(parameters, expected, strict=True):
            assert (there - here).abs().max() < 1e-6
