"""Callbacks in Keras' own form give the results of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.frontends.callbacks import Callback, EarlyStopping, LambdaCallback
from tests.support import data, mlp

pytestmark = pytest.mark.timeout(60)
X, Y = data(37)
BATCH = 8


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
    """A callback may compute gradients, for a saliency map say."""
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
