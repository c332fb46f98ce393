"""Odd modules, optimizers and losses, on one device and on two replicas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stratagem as sg
from tests.support import by_hand, data, distance, mlp, moved, strategy


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture(scope="module")
def two() -> Iterator[sg.Strategy]:
    made = strategy(2)
    yield made
    made.close()


def model_on(on: sg.Strategy, module: nn.Module | None = None, **options: Any) -> sg.Model:
    model = sg.Model(copy.deepcopy(module or mlp()), on)
    model.compile(**{"optimizer": sgd, "loss": "cross_entropy", **options})
    return model


# --- lazy modules --------------------------------------------------------------------------------


def lazy() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_a_lazy_module_must_have_seen_a_batch(two: sg.Strategy, verb: str) -> None:
    x, y = data(20)
    model = model_on(two, lazy())
    with pytest.raises(sg.NotDistributable, match=r"'0.weight' has no shape yet.*one batch"):
        getattr(model, verb)(*((x,) if verb == "predict" else (x, y)))
    module = lazy()
    module(x[:1])
    model = model_on(two, module)
    model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    alone = by_hand(module, sgd, F.cross_entropy, x, y, batch=10)
    assert distance(alone, model.module) < 2e-6


def test_a_lazy_module_on_one_device_is_torchs_own_affair() -> None:
    """The first batch gives it its shape, as in a loop by hand."""
    x, y = data(20)
    model = model_on(strategy(1), lazy())
    torch.manual_seed(5)
    model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    module = lazy()
    optimizer = sgd(module.parameters())
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # the seed that fit draws for shuffling
    for i in (0, 10, 0, 10):
        F.cross_entropy(module(x[i : i + 10]), y[i : i + 10]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(module, model.module) < 2e-6


def test_an_unshaped_module_is_not_saved(tmp_path: Any) -> None:
    with pytest.raises(sg.UsageError, match=r"'0.weight' has no shape yet.*one batch"):
        model_on(strategy(1), lazy()).save(tmp_path / "m")


# --- LBFGS ---------------------------------------------------------------------------------------


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_lbfgs_on_one_device_is_torchs(clip: float | None) -> None:
    x, y = data(40)
    module = mlp()
    optimizer = lbfgs(module.parameters())
    losses = []
    for i in (0, 20, 0, 20):

        def closure(i: int = i) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x[i : i + 20]), y[i : i + 20])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            return loss

        losses.append(float(optimizer.step(closure)))
    assert moved(mlp(), module)
    model = model_on(strategy(1), optimizer=lbfgs, metrics=["accuracy"], clip_norm=clip)
    history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
    assert distance(module, model.module) < 2e-6
    assert history["loss"] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], abs=1e-6)
    assert all(0 <= accuracy <= 1 for accuracy in history["accuracy"])


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "float16"}])
def test_lbfgs_refuses_what_it_cannot_follow(options: Any) -> None:
    with pytest.raises(sg.UsageError, match=r"LBFGS.*another optimizer"):
        model_on(strategy(1), optimizer=lbfgs, **options).fit(*data(20), verbose=0)


# --- no targets ----------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_without_targets(two: sg.Strategy) -> None:
    """fit(x): the loss of an output and nothing."""
    x, _ = data(37)
    model = model_on(
        two, loss=lambda output, nothing: (output**2).mean(),
        metrics={"size": lambda output, nothing: (output**2).mean()},
    )  # fmt: skip
    history = model.fit(x, batch_size=12, epochs=2, shuffle=False, verbose=0).history
    alone = by_hand(mlp(), sgd, lambda output, _: (output**2).mean(), x, x, batch=12)
    assert distance(alone, model.module) < 2e-6
    assert history["loss"][1] < history["loss"][0]
    with torch.no_grad():
        expected = float((alone(x) ** 2).mean())
    results = model.evaluate(x, batch_size=12)
    assert results["loss"] == pytest.approx(expected, abs=1e-5)
    assert results["size"] == pytest.approx(expected, abs=1e-5)
