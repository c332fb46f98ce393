"""A loss that keeps a moving average in a buffer: replicas settle it as they do the model's."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stratagem as sg
from tests.support import data, distance, mlp, moved, strategy

pytestmark = pytest.mark.timeout(60)

BATCH, EPOCHS = 8, 3


class Scaled(nn.Module):
    """Divides by the size that outputs have had so far; makes another buffer at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        size = output.detach().abs().mean()
        if not hasattr(self, "first"):
            self.register_buffer("first", size)
        self.scale = 0.9 * self.scale + 0.1 * size
        return F.cross_entropy(output, target) / self.scale


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def by_hand(x: Tensor, y: Tensor, replicas: int) -> tuple[nn.Module, Tensor]:
    """One model, and a loss for each of the shares, whose averages are averaged after an epoch."""
    module, losses = mlp(), [Scaled() for _ in range(replicas)]
    optimizer = sgd(module)
    for _ in range(EPOCHS):
        for rows, classes in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            shares = zip(losses, rows.chunk(replicas), classes.chunk(replicas), strict=True)
            for loss, part, target in shares:
                (loss(module(part), target) * len(part) / len(rows)).backward()
            optimizer.step()
        mean = torch.stack([loss.scale for loss in losses]).mean()
        for loss in losses:
            loss.scale = mean.clone()
    return module, losses[0].scale


@pytest.fixture(scope="module", params=["shared_memory", "ring"])
def two(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    with strategy(2, cross_device_ops=request.param) as made:
        yield made


def test_an_average_of_the_loss_is_that_of_all_replicas(two: sg.Strategy) -> None:
    x, y = data(32)
    x[::2] *= 5.0  # so that shares differ
    x = torch.cat([torch.cat([part[::2], part[1::2]]) for part in x.split(BATCH)])
    model, loss = sg.Model(mlp(), two), Scaled()
    before = copy.deepcopy(loss.scale)
    model.compile(optimizer=sgd(model.module), loss=loss)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    module, scale = by_hand(x, y, 2)
    assert moved(mlp(), module) and abs(float(scale - before)) > 0.1
    assert abs(float(loss.scale - scale)) < 1e-5
    assert distance(model.module, module) < 1e-5


def test_servers_refuse_it() -> None:
    x, y = data(32)
    cluster = sg.LocalCluster(workers=2, ps=1)
    with sg.ParameterServerStrategy(cluster, updates=sg.Synchronous()) as where:
        model = sg.Model(mlp(), where)
        model.compile(optimizer="sgd", loss=Scaled())
        with pytest.raises(sg.StratagemError, match="the loss wrote into its buffer 'scale'"):
            model.fit(x, y, batch_size=BATCH, verbose=0)
