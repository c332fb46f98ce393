"""spectral_norm iterates once per forward, also on replicas without rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg
from tests.support import data, distance, strategy

pytestmark = pytest.mark.timeout(60)

BATCH, EPOCHS = 8, 3


@pytest.fixture(scope="module", params=["shared_memory", "ring"])
def three(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    with strategy(3, cross_device_ops=request.param) as made:
        yield made


def net(norm: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(norm(nn.Linear(6, 16)), nn.Tanh(), norm(nn.Linear(16, 4)))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"]
)
def test_a_last_batch_of_one_row(three: sg.Strategy, norm: Any, accumulate: int) -> None:
    x, y = data(33)
    plain = net(norm)
    optimizer = sgd(plain.parameters())
    for _ in range(EPOCHS):
        batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        for number, (rows, classes) in enumerate(batches, 1):
            (F.cross_entropy(plain(rows), classes) / accumulate).backward()  # type: ignore[no-untyped-call]
            if number % accumulate == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    model = sg.Model(net(norm), three)
    model.compile(optimizer=sgd, loss="cross_entropy", accumulate=accumulate)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    assert distance(net(norm), plain) > 1e-2
    assert distance(model.module, plain) < 2e-6
