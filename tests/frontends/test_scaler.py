"""The gradient scaler of precision="float16" on several replicas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stratagem as sg
from tests.support import data, distance, mlp, moved, strategy


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def by_hand(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    module = copy.deepcopy(module)
    optimizer, scaler = sgd(module.parameters()), torch.amp.GradScaler("cpu")
    for row in range(len(x)):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(module(x[row : row + 1]), y[row : row + 1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return module


@pytest.mark.timeout(60)
def test_a_replica_whose_first_shares_are_empty() -> None:
    x, y = data(7)
    made = strategy(2)
    try:
        model = sg.Model(mlp(), made)
        model.compile(optimizer=sgd, loss="cross_entropy", precision="float16")
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    finally:
        made.close()
    alone = by_hand(mlp(), x, y)
    assert moved(mlp(), alone)
    assert distance(alone, model.module) < 1e-6


class Thaw(sg.callbacks.Callback):
    """Trains the first layer in the second and third epoch only."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        next(self.model.module.children()).requires_grad_(epoch in (1, 2))


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.timeout(60)
def test_layers_unfrozen_between_epochs_keep_the_scale() -> None:
    """The scale survives when the first layer is unfrozen.

    The targets are so large that the first scale has been halved by then; a new scaler would skip
    updates again. Batches have one row, since the sum of several rows may overflow float16 where a
    share's does not.
    """
    x, y = data(12)[0], torch.full((12, 4), 40.0)
    plain = mlp()
    optimizer, scaler = momentum(plain), torch.amp.GradScaler("cpu")
    for epoch in range(4):
        next(plain.children()).requires_grad_(epoch in (1, 2))
        for rows, targets in zip(x.split(1), y.split(1), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(plain(rows), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**16
    with strategy(2) as made:
        module = mlp()
        model = sg.Model(module, made)
        model.compile(optimizer=momentum(module), loss="mse", precision="float16")
        next(module.children()).requires_grad_(False)
        model.fit(x, y, batch_size=1, epochs=4, shuffle=False, verbose=0, callbacks=[Thaw()])
    first = next(iter(plain.state_dict()))
    assert not torch.equal(plain.state_dict()[first], mlp().state_dict()[first])
    assert distance(plain, model.module) < 1e-5
