"""The strategy of docs/extending.md, as it is printed there."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import by_hand, data, distance, mlp

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
DEVICES = ["cpu:0", "cpu:1"]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture(scope="module")
def made() -> Any:
    """The page's names."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) < 60
    names: dict[str, Any] = {"__name__": "__main__"}  # so that other processes get it by value
    exec(compile(code, str(PAGE), "exec"), names)
    return names["LocalSteps"]


@pytest.fixture(params=[1, 4])
def local(made: Any, request: pytest.FixtureRequest) -> Iterator[tuple[sg.Strategy, int]]:
    with made(DEVICES, request.param) as strategy:
        yield strategy, request.param


@pytest.mark.timeout(60)
def test_weights_that_meet_every_update_are_those_of_one_device(
    local: tuple[sg.Strategy, int],
) -> None:
    """With SGD the mean of updates is the update by the mean; apart for 4 steps it is not."""
    strategy, every = local
    x, y = data(40)
    model = sg.Model(copy.deepcopy(mlp()), strategy)
    model.compile(optimizer=sgd, loss="cross_entropy")
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=10)
    apart = distance(alone, model.module)
    assert (apart < 2e-6) if every == 1 else (1e-5 < apart < 0.1)
    assert history.history["loss"][1] < history.history["loss"][0]


@pytest.mark.timeout(60)
def test_in_a_custom_loop(local: tuple[sg.Strategy, int]) -> None:
    strategy, every = local
    x, y = data(40)

    def train() -> list[torch.Tensor]:
        module = copy.deepcopy(mlp())
        loader = DataLoader(TensorDataset(x, y), batch_size=10)
        model, optimizer, shares = strategy.prepare(module, sgd(module.parameters()), loader)
        for _ in range(2):
            for a, b in shares:
                optimizer.zero_grad()
                F.cross_entropy(model(a), b).backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    first, second = strategy.run(train)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=10)
    pairs = zip(alone.parameters(), first, strict=True)
    apart = max(float((a.detach() - b).abs().max()) for a, b in pairs)
    assert (apart < 2e-6) if every == 1 else (1e-5 < apart < 0.1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # 8 updates: they met


@pytest.mark.timeout(120)
def test_in_keras(made: Any) -> None:
    x, y = (each.numpy() for each in data(40))

    def train(scope: Any) -> Any:
        keras.utils.set_random_seed(3)
        with scope:
            model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(4)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    alone = train(nullcontext())
    for every in (1, 4):
        with made(DEVICES, every) as strategy:
            found = train(strategy.scope())
        apart = max(float(np.abs(a - b).max()) for a, b in zip(alone, found, strict=True))
        assert (apart < 2e-6) if every == 1 else (1e-5 < apart < 0.1)
