"""The history of custom steps is that of plain Keras on one device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import stratagem as sg
from tests.frontends.keras.served_support import close_served, served
from tests.keras_support import BOOKS, digits, history_apart, strategy, train
from tests.support import cpus

pytestmark = pytest.mark.timeout(60)

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X, Y = digits(43)
X *= np.linspace(0.1, 3, len(X), dtype="float32")[:, None]
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 8, "epochs": 2, "shuffle": False}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, sg.Strategy]]:
    central = sg.CentralStorageStrategy(cpus(2))
    yield {
        "mirrored": strategy(2),
        "central": central,
        "synchronous": served(sg.Synchronous(), 2, 1),
        "spares": served(sg.Synchronous(spares=1), 3, 1),
        "one worker": served(sg.Asynchronous(), 1, 1),
        "free": served(sg.Asynchronous(), 2, 1),
    }
    central.close()
    close_served()


class Base(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def learn(self, x: Any, y: Any, _: Any = None) -> tuple[Any, Any]:
        self.zero_grad()
        p = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=p)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return loss.detach(), p.detach()


class Trackers(Base):
    """As in Keras' example of a VAE: what a tracker is called is not what its log is called."""

    def __init__(self) -> None:
        super().__init__()
        self.total = keras.metrics.Mean(name="total_loss")
        self.size = keras.metrics.Mean(name="total_size")

    metrics = property(lambda self: [self.total, self.size])

    def count(self, loss: Any, p: Any) -> Any:
        self.total.update_state(loss)
        self.size.update_state((p**2).mean())
        return {"loss": self.total.result(), "size": float(self.size.result())}

    def train_step(self, data: Any) -> Any:
        return self.count(*self.learn(*data))

    def test_step(self, data: Any) -> Any:
        p = self(data[0])
        return self.count(LOGITS(data[1], p), p)


class Numbers(Trackers):
    """Some of which no metric holds; one is, at an epoch's first step, what a metric says."""

    def train_step(self, data: Any) -> Any:
        loss, p = self.learn(*data)
        return self.count(loss, p) | {"now": float(loss), "twice": 2 * loss}


class Same(Trackers):
    """Logs that are called as the metrics are."""

    def count(self, loss: Any, p: Any) -> Any:
        super().count(loss, p)
        return self.get_metrics_result()


class Named(Base):
    """Numbers under the name of a metric that is never given anything."""

    def train_step(self, data: Any) -> Any:
        loss, p = self.learn(*data)
        return {"loss": loss, "size": (p**2).mean()}


class Guided(Base):
    """The step of Keras' guide for torch."""

    def train_step(self, data: Any) -> Any:
        loss, p = self.learn(*data)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(data[1], p)
        return {m.name: m.result() for m in self.metrics}


class Inside(Guided):
    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {"right": logs["compile_metrics"], "sizes": {"x": {"mean": ops.mean(data[0])}}}


class Renaming(Base):
    """Keras' own step with custom logs."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {f"own_{name}": value for name, value in logs.items()}


class Half(keras.metrics.Mean):
    """A class of the user's own, given one number a batch."""

    def result(self) -> Any:
        return super().result() / 2


class Derived(Base):
    def __init__(self) -> None:
        super().__init__()
        self.half = Half(name="half")

    def train_step(self, data: Any) -> Any:
        self.half.update_state(self.learn(*data)[0])
        return {"half_loss": self.half.result()}


class Added(keras.metrics.Metric):
    """A result that is a number for each class."""

    def __init__(self) -> None:
        super().__init__(name="added")
        self.sums = self.add_weight(shape=(3,), initializer="zeros")

    def update_state(self, p: Any) -> None:
        self.sums.assign_add(ops.sum(p, axis=0))

    def result(self) -> Any:
        return self.sums * 0.5


class Classes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.added = Added()

    def train_step(self, data: Any) -> Any:
        loss, p = self.learn(*data)
        self.added.update_state(p)
        return {"halves": self.added.result(), "now": float(loss)}


EVERY = [Trackers, Numbers, Same, Named, Guided, Inside, Renaming, Derived]


def compile(rate: float = 0.1) -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(rate), "loss": LOGITS, "metrics": ["accuracy"]}


@cache
def alone(build: Any, rate: float = 0.1) -> dict[str, list[float]]:
    """The history of plain Keras on one device."""
    return train(build, lambda: compile(rate), FIT)[1]


@pytest.mark.parametrize(
    ("build", "where"),
    [
        *((build, "mirrored") for build in EVERY),
        *((build, "synchronous") for build in EVERY),
        (Trackers, "central"),
        (Guided, "central"),
        (Numbers, "spares"),
        (Guided, "one worker"),
        (Numbers, "one worker"),
    ],
)
def test_the_history_is_that_of_one_device(build: Any, where: str, strategies: Any) -> None:
    _, history = train(build, compile, FIT, strategies[where])
    assert history_apart(alone(build), history) < 1e-5


@pytest.mark.parametrize("where", ["mirrored", "synchronous"])
def test_a_number_for_each_class(where: str, strategies: Any) -> None:
    _, history = train(Classes, compile, FIT, strategies[where])
    for log, values in alone(Classes).items():
        np.testing.assert_allclose(history[log], values, atol=1e-5)


@pytest.mark.parametrize("build", [Trackers, Numbers, Guided, Renaming])
def test_workers_free_of_step_report_all_that_was_counted(build: Any, strategies: Any) -> None:
    """At a rate of 0 nothing depends on who was first. Of numbers there is the epoch's mean."""
    expected = dict(alone(build, 0.0))
    model, history = train(build, lambda: compile(0.0), FIT, strategies["free"])
    if build is Numbers:
        mean = float(LOGITS(Y, model(X)).detach())
        expected |= {"now": [mean] * 2, "twice": [2 * mean] * 2}
    assert history_apart(expected, history) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("where", ["mirrored", "synchronous"])
@pytest.mark.parametrize("build", [Numbers, Named, Guided])
def test_single_steps(build: Any, where: str, strategies: Any) -> None:
    """What callbacks see, and what train_on_batch returns."""

    def play(where: sg.Strategy | None) -> list[dict[str, list[float]]]:
        seen: list[Any] = []
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
        model, _ = train(build, compile, FIT | {"callbacks": [watch]}, where)
        for _ in range(2):
            seen.append(model.train_on_batch(X[:9], Y[:9], return_dict=True))
        return [{key: [value] for key, value in each.items()} for each in seen]

    for expected, found in zip(play(None), play(strategies[where]), strict=True):
        assert history_apart(expected, found) < 1e-5


@pytest.mark.parametrize("where", ["mirrored", "synchronous"])
def test_an_evaluation_of_ones_own(where: str, strategies: Any) -> None:
    fit = FIT | {"validation_data": (X[:11], Y[:11]), "validation_batch_size": 4}
    plain, expected = train(Trackers, compile, fit)
    model, history = train(Trackers, compile, fit, strategies[where])
    assert {"val_loss", "val_size"} < set(history) - BOOKS
    assert history_apart(expected, history) < 1e-5
    given = {"batch_size": 4, "verbose": 0}
    assert np.allclose(plain.evaluate(X, Y, **given), model.evaluate(X, Y, **given), atol=1e-5)
    assert all("result" not in metric.__dict__ for metric in model.metrics)  # the user's own again
