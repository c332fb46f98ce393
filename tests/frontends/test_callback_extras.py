"""Callbacks in Keras' own form, and what they do to the loss: as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg
from stratagem.frontends.callbacks import Callback, EarlyStopping, LambdaCallback
from tests.support import data, distance, mlp

pytestmark = pytest.mark.timeout(60)
X, Y = data(37)
BATCH = 8


class Weighted(nn.Module):
    """A loss of one's own with a number in it."""

    def __init__(self, kind: str = "buffer") -> None:
        super().__init__()
        self.factor: torch.Tensor
        if kind == "buffer":
            self.register_buffer("factor", torch.tensor(1.0))
        else:
            self.factor = nn.Parameter(torch.tensor(1.0), requires_grad=False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none") * self.factor


def torchs() -> nn.Module:
    return nn.MultiMarginLoss(weight=torch.ones(4))


def trained(where: sg.Strategy | None, loss: nn.Module, change: Any) -> tuple[sg.Model, Any]:
    model = sg.Model(mlp(), where)
    model.compile(lambda params: torch.optim.SGD(params, lr=0.1), loss)
    history = model.fit(
        X, Y, epochs=3, batch_size=BATCH, shuffle=False, verbose=0,
        callbacks=LambdaCallback(**{change: lambda *_: _change(loss)}),
    )  # fmt: skip
    return model, history.history["loss"]


@torch.no_grad()
def _change(loss: Any) -> None:
    if isinstance(loss, Weighted):
        loss.factor.mul_(0.8)
    else:
        loss.weight[0].mul_(1.5)


@pytest.mark.parametrize("made", [Weighted, partial(Weighted, "parameter"), torchs])
@pytest.mark.parametrize("change", ["on_epoch_end", "on_train_batch_end", "on_epoch_begin"])
def test_what_a_callback_writes_into_the_loss_is_followed(
    three: sg.Strategy, made: Any, change: str
) -> None:
    alone, expected = trained(None, made(), change)
    model, losses = trained(three, made(), change)
    assert distance(model.module, alone.module) < 1e-6
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_same_between_batches_of_evaluate(three: sg.Strategy) -> None:
    found = []
    for where in (None, three):
        loss = Weighted()
        model = sg.Model(mlp(), where)
        model.compile("sgd", loss)
        callback = LambdaCallback(on_test_batch_begin=lambda *_: _change(loss))  # noqa: B023
        result = model.evaluate(X, Y, batch_size=BATCH, callbacks=callback, verbose=0)
        found.append(result["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_every_method_may_take_logs_or_leave_them_out(two: sg.Strategy) -> None:
    seen: list[str] = []

    class Both(Callback):
        def on_train_begin(self, logs: Any) -> None:  # type: ignore[override]
            seen.append(f"begin {logs}")

        def on_train_end(self) -> None:  # type: ignore[override]
            seen.append("end")

    noting = LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(f"epoch {logs}"),
        on_train_batch_begin=lambda batch, logs: seen.append(f"batch {batch} {logs}"),
    )
    model = sg.Model(mlp(), two)
    model.compile("sgd", "cross_entropy")
    model.fit(X[:16], Y[:16], batch_size=BATCH, verbose=0, callbacks=[Both(), noting])
    assert seen == ["begin {}", "epoch {}", "batch 0 {}", "batch 1 {}", "end"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_logs_that_are_kept_stay_those_of_their_batch(two: sg.Strategy, replicas: int) -> None:
    kept: list[Any] = []
    seen: list[float] = []

    class Keep(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kept.append(logs)

    class Look(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(logs["loss"])

    for callback in (Keep(), Look()):
        model = sg.Model(mlp(), two if replicas == 2 else None)
        model.compile("sgd", "cross_entropy")
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[callback])
    assert [logs["loss"] for logs in kept] == seen and len(set(seen)) == 5


def test_gradients_in_callbacks_of_evaluate_and_predict(two: sg.Strategy) -> None:
    """A map of what the output depends on, say."""
    model = sg.Model(mlp(), two)
    model.compile("sgd", "cross_entropy")
    found: list[float] = []

    def look(*_: Any) -> None:
        row = X[:1].clone().requires_grad_()
        model.module(row).sum().backward()
        assert row.grad is not None
        found.append(float(row.grad.abs().sum()))
        model.module.zero_grad()

    model.evaluate(X, Y, batch_size=20, callbacks=LambdaCallback(on_test_batch_end=look), verbose=0)
    model.predict(X, batch_size=20, callbacks=LambdaCallback(on_predict_batch_end=look), verbose=0)
    assert len(found) == 4 and all(found)


@pytest.mark.parametrize("weights", [[1.0, 2.0, 0.5], torch.tensor([1.0, 2.0, 0.5])])
def test_class_weights_one_after_the_other(two: sg.Strategy, weights: Any) -> None:
    losses = []
    for given in (weights, {0: 1.0, 1: 2.0, 2: 0.5}):
        model = sg.Model(mlp(), two)
        model.compile("sgd", "cross_entropy")
        history = model.fit(X, Y, batch_size=BATCH, shuffle=False, class_weight=given, verbose=0)
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]


def test_sentences(two: sg.Strategy) -> None:
    model = sg.Model(mlp(), two)
    model.compile("sgd", "cross_entropy")
    with pytest.raises(sg.UsageError, match="EarlyStopping is a class; give an instance"):
        model.fit(X, Y, callbacks=[EarlyStopping], verbose=0)  # type: ignore[list-item]
    with pytest.raises(sg.UsageError, match="validation_batch_size is 0"):
        model.fit(X, Y, validation_batch_size=0, verbose=0)
