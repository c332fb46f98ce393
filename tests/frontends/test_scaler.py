"""precision="float16": the gradient scaler on several replicas."""

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
