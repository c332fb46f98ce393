"""What a loop trains beside the prepared model: refused by name where replicas would come apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import data, distance, in_step, mlp, moved

pytestmark = pytest.mark.timeout(60)


class Beside:
    """A parameter, a tensor and a layer, each with an optimizer of its own."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.scale = torch.ones((), requires_grad=True)
        self.layer, self.probe = nn.Linear(4, 4), nn.Linear(4, 4)
        params = [self.scale, *self.layer.parameters(), *self.probe.parameters()]
        self.optimizer = torch.optim.SGD(params, lr=0.1)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


#: what is done in batch i, besides a step on the model's output
Way = Callable[[Beside, Tensor, Tensor, int], Tensor | None]


def a_tensor(beside: Beside, out: Tensor, y: Tensor, i: int) -> Tensor:
    return F.cross_entropy(out * beside.scale, y)


def a_layer_from_the_last_batch_on(beside: Beside, out: Tensor, y: Tensor, i: int) -> Tensor:
    loss = F.cross_entropy(out, y)
    return loss if i < 4 else loss + F.cross_entropy(beside.layer(out), y)


def a_temperature(beside: Beside, out: Tensor, y: Tensor, i: int) -> None:
    (beside.scale * (out.detach().pow(2).mean(1) - 0.5)).mean().backward()


def a_probe(beside: Beside, out: Tensor, y: Tensor, i: int) -> None:
    F.cross_entropy(beside.probe(out.detach()), y).backward()


WAYS: list[Way] = [a_tensor, a_layer_from_the_last_batch_on, a_temperature, a_probe]


def train(on: sg.Strategy | None, way: Way) -> list[Tensor]:
    x, y = data(37)
    model, beside = mlp(), Beside()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for i, (a, b) in enumerate(loader):
        out = model(a)
        loss = way(beside, out, b, i)
        (F.cross_entropy(out, b) if loss is None else loss).backward()
        optimizer.step()
        beside.step()
        optimizer.zero_grad()
    return [beside.scale.detach(), *(p.detach() for p in beside.probe.parameters())]


@pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)
def test_what_all_replicas_train_is_prepared_or_refused(way: Way, two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"prepare (parameter 'weight' of|a trained tensor)"):
        two.run(train, two, way)


def test_a_head_beside_the_model_of_servers_is_refused() -> None:
    with (
        in_step("servers", 2) as on,
        pytest.raises(sg.UsageError, match=r"prepare a trained tensor of shape \[\], too"),
    ):
        on.run(train, on, a_tensor)


def alike(on: sg.Strategy | None) -> nn.Module:
    """A probe that every replica trains on the same rows, and inputs with gradients."""
    x, y = data(37)
    model, probe = mlp(), mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = torch.optim.SGD(probe.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for a, b in loader:
        a = a.clone().requires_grad_(True)
        F.cross_entropy(model(a), b).backward()
        optimizer.zero_grad()
        F.cross_entropy(model((a + 0.1 * a.grad.sign()).detach()), b).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(probe(x), y).backward()
        steps.step()
        steps.zero_grad()
    return nn.ModuleList([model, probe])


def test_what_is_trained_on_the_same_rows_by_all_is_as_on_one_device(
    two: sg.MirroredStrategy,
) -> None:
    expected = alike(None)
    assert moved(expected[0], mlp())
    assert moved(expected[1], mlp())
    for trained in two.run(alike, two):
        assert distance(trained, expected) < 1e-6
