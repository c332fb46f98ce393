"""A loss that is not finite is told once a fit, with its step and whose rows made it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import stratagem as sg
from tests import served_support
from tests.support import cpus, data, mlp, strategy

pytestmark = pytest.mark.timeout(60)

X, Y = data(9)  # batches of 4, 4 and 1 rows
X[6] = math.nan  # in the second batch: of two or three replicas the second has it


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    served_support.close_all()


def first_by_hand() -> int:
    """Return the first step, from 1 on, whose loss is not finite on one device."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, start in enumerate(range(0, len(X), 4), 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(X[start : start + 4]), Y[start : start + 4])
        if not loss.isfinite():
            return step
        loss.backward()
        optimizer.step()
    raise AssertionError("the loss stayed finite")


def told_by(where: sg.Strategy, caplog: pytest.LogCaptureFixture) -> list[str]:
    model = sg.Model(mlp(), where)
    model.compile(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss="cross_entropy")
    caplog.clear()
    found = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    assert all(math.isnan(loss) for loss in found.history["loss"])  # it trains on
    return [text for text in caplog.messages if text.startswith("the loss became nan")]


@pytest.mark.parametrize("form", ["1", "2", "3", "meetings", "sharded"])
def test_replicas(form: str, caplog: pytest.LogCaptureFixture) -> None:
    if form == "sharded":
        where: sg.Strategy = sg.ShardedStrategy(cpus(2))
    else:
        where = strategy(2, sync=sg.LocalSteps(2)) if form == "meetings" else strategy(int(form))
    with where:
        told = told_by(where, caplog)
    rows = "" if form == "1" else ", made by rows of replica 1"
    assert len(told) == 1
    assert f"in step {first_by_hand()} of epoch 1{rows};" in told[0]


@pytest.mark.parametrize("rule", ["synchronous", "asynchronous"])
def test_workers(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    where = served_support.strategy("central", rule)
    told = told_by(where, caplog)
    assert len(told) == 1
    assert f"in step {first_by_hand()} of epoch 1, made by rows of " in told[0]


def test_finite(caplog: pytest.LogCaptureFixture) -> None:
    model = sg.Model(mlp(), strategy(1))
    model.compile("sgd", "cross_entropy")
    model.fit(X[:6], Y[:6], batch_size=4, epochs=2, verbose=0)
    assert "the loss became" not in caplog.text
