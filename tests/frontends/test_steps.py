"""Unusual modules, optimizers and losses on one device and on two replicas."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from tests.support import by_hand, data, distance, mlp, moved, strategy


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


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
    """Its first batch gives it its shape, as in a loop by hand."""
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
    """`fit(x)` calls the loss with an output and None."""
    x, _ = data(37)
    model = model_on(
        two,
        loss=lambda output, nothing: (output**2).mean(),
        metrics={"size": lambda output, nothing: (output**2).mean()},
    )
    history = model.fit(x, batch_size=12, epochs=2, shuffle=False, verbose=0).history
    alone = by_hand(mlp(), sgd, lambda output, _: (output**2).mean(), x, x, batch=12)
    assert distance(alone, model.module) < 2e-6
    assert history["loss"][1] < history["loss"][0]
    with torch.no_grad():
        expected = float((alone(x) ** 2).mean())
    results = model.evaluate(x, batch_size=12)
    assert results["loss"] == pytest.approx(expected, abs=1e-5)
    assert results["size"] == pytest.approx(expected, abs=1e-5)


# --- losses of one's own -------------------------------------------------------------------------


def halves(x: Tensor, y: Tensor) -> Tensor:
    """A contrastive loss, which compares every row with every other of its batch."""
    return F.cross_entropy(x @ x.T, torch.arange(len(x)))


def masked(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return (each * (target > 1)).sum() / (target > 1).sum()


ODD: dict[str, Any] = {
    "sum": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "contrastive": halves,
    "masked": masked,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize("name", list(ODD))
def test_a_number_that_is_no_mean_over_rows_is_refused(
    two: sg.Strategy, name: str, verb: str
) -> None:
    x, y = data(37)
    model = model_on(two, loss=ODD[name])
    options = {"verbose": 0, "shuffle": False} if verb == "fit" else {}
    with pytest.raises(sg.NotDistributable, match=r'mean over.*reduction="none"'):
        getattr(model, verb)(x, y, batch_size=12, **options)
    alone = model_on(strategy(1), loss=ODD[name])
    getattr(alone, verb)(x, y, batch_size=12, **options)


FINE: dict[str, Any] = {
    "mean": lambda o, t: F.cross_entropy(o, t),
    "rows": lambda o, t: F.cross_entropy(o, t, reduction="none"),
    "near nothing": lambda o, t: 1e-12 * F.cross_entropy(o, t),
    "around nothing": lambda o, t: (o - o.detach().mean(1, keepdim=True)).mean(),
    "a dict": lambda o, t: F.cross_entropy(o["logits"], t),
    "a number beside": lambda o, t: F.cross_entropy(o["logits"], t) + 0 * o["number"],
}


class Named(nn.Module):
    """Dict outputs, of which one may have no rows."""

    def __init__(self, number: bool) -> None:
        super().__init__()
        self.inner, self.number = mlp(), number

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x)
        return {"logits": logits, **({"number": logits.mean()} if self.number else {})}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rows", [3, 37])
@pytest.mark.parametrize("name", list(FINE))
def test_a_mean_over_rows_is_not_refused(two: sg.Strategy, name: str, rows: int) -> None:
    """Even for shares of two rows, of one and of none."""
    x, y = data(rows)
    module = mlp() if name not in ("a dict", "a number beside") else Named(name != "a dict")
    model = model_on(two, module, loss=FINE[name])
    model.fit(x, y, batch_size=2 if rows == 3 else 12, epochs=2, shuffle=False, verbose=0)

    def plain(output: Any, target: Tensor) -> Tensor:
        return FINE[name](output, target).mean()

    alone = by_hand(module, sgd, plain, x, y, batch=2 if rows == 3 else 12)
    assert distance(alone, model.module) < 2e-6


@pytest.mark.timeout(60)
def test_what_cannot_be_tried_is_said(two: sg.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    def of_six(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.view(6, 4), target)

    model = model_on(two, loss=of_six)
    model.fit(*data(36), batch_size=12, verbose=0)
    assert "unchecked" in caplog.text and caplog.text.count("cannot be tried") == 1


@pytest.mark.timeout(60)
def test_a_step_that_fails_itself_is_not_taken_on_trust(
    two: sg.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(36)
    model = model_on(two, loss=lambda output, target: F.cross_entropy(output, target + 7))
    with pytest.raises(IndexError, match="out of bounds"):
        model.fit(x, y, batch_size=12, verbose=0)
    assert "unchecked" not in caplog.text


@pytest.mark.timeout(60)
def test_a_random_loss_is_left_alone(two: sg.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output + torch.randn_like(output), target)

    model_on(two, loss=noisy).fit(*data(37), batch_size=12, verbose=0)
    assert "cannot be tried" not in caplog.text


@pytest.mark.timeout(60)
def test_the_check_leaves_the_dice_alone(two: sg.Strategy) -> None:
    """The row check restores the rngs that a loss and a model draw from."""

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output + torch.randn(()) + random.random(), target)

    ends = []
    for check in (True, False):
        torch.manual_seed(5)
        random.seed(5)
        model = sg.Model(nn.Sequential(mlp(), nn.Dropout(0.3)), two)
        model.compile(sgd, noisy, check=check)
        model.fit(*data(37), batch_size=12, verbose=0)
        ends.append((model.module, random.random()))
    assert distance(ends[0][0], ends[1][0]) == 0.0 and ends[0][1] == ends[1][1]


class Fading:
    """A loss that counts its calls, and weighs less with each."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) / self.calls


@pytest.mark.timeout(60)
def test_a_loss_with_a_memory_does_not_notice(two: sg.Strategy) -> None:
    x, y = data(36)
    model = model_on(two, loss=Fading())
    model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    alone = by_hand(mlp(), sgd, Fading(), x, y, batch=12)
    assert distance(alone, model.module) < 2e-6
