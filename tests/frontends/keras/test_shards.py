"""Keras models under a ShardedStrategy on one machine: the result of one device, one set of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from keras import layers
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.replicas import follower
from tests.keras_both import alike
from tests.spread import assert_work, watched
from tests.support import cpus

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def sharded() -> Iterator[sg.ShardedStrategy]:
    strategy = sg.ShardedStrategy(cpus(2), sync_batchnorm=True)
    yield strategy
    strategy.close()


def numbers(rows: int) -> tuple[Any, Any]:
    dice = np.random.default_rng(rows)
    return dice.normal(size=(rows, 6)).astype("float32"), dice.integers(0, 3, rows)


def net() -> Any:
    body = [layers.Dense(12, "tanh", kernel_regularizer="l2"), layers.Dense(8, "tanh")]
    return keras.Sequential([keras.Input((6,)), *body, layers.Dense(3)])


def normed() -> Any:
    body = [layers.Dense(12, use_bias=False), layers.BatchNormalization(), layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *body])


def trained(
    on: sg.Strategy | None, build: Callable[[], Any], optimizer: Any, rows: int, **fit: Any
) -> Any:
    keras.utils.set_random_seed(7)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with on.scope() if on is not None else nullcontext():
        model = build()
        model.compile(optimizer=optimizer(), loss=loss, metrics=["accuracy"])
    x, y = numbers(rows)
    history = model.fit(x, y, batch_size=13, epochs=2, verbose=0, shuffle=False, **fit)
    return model, history.history


ADAM = keras.optimizers.Adam


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5), clipnorm=0.05
        ),
        keras.optimizers.Nadam,
    ],
)
def test_the_result_of_one_device(sharded: sg.ShardedStrategy, optimizer: Any) -> None:
    """Shares of 7 and 6 rows, then one of a single row and an empty one."""
    weight = np.random.default_rng(1).uniform(size=27)
    (one, history), alone = watched(lambda: trained(None, net, optimizer, 27, sample_weight=weight))
    (model, found), spread = watched(
        lambda: trained(sharded, net, optimizer, 27, sample_weight=weight), sharded
    )
    alike(one.get_weights(), model.get_weights(), 1e-6)
    alike(history, found, 1e-5)
    assert_work(alone, spread)


def test_batch_normalization_and_other_calls(sharded: sg.ShardedStrategy, tmp_path: Path) -> None:
    one, _ = trained(None, normed, ADAM, 26)
    model, _ = trained(sharded, normed, ADAM, 26)
    x, y = numbers(27)
    for each in (one, model):
        each.train_on_batch(x[:5], y[:5])
        each.train_on_batch(x[5:9], y[5:9])
    alike(one.get_weights(), model.get_weights(), 1e-5)
    alike(one.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0), 1e-5)
    alike(one.predict(x, verbose=0), model.predict(x, verbose=0), 1e-4)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    alike(loaded.get_weights(), model.get_weights(), 0)
    alike(
        [v.numpy() for v in one.optimizer.variables],
        [v.numpy() for v in loaded.optimizer.variables],
        1e-5,
    )


def test_one_set_of_weights_slots_and_gradients(sharded: sg.ShardedStrategy) -> None:
    """What another replica writes is seen here, and no replica keeps a gradient."""
    model, _ = trained(sharded, net, ADAM, 13)
    x, y = numbers(13)
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    sharded.run(_write)
    assert all(float(v.numpy().reshape(-1)[0]) == 5.0 for v in model.trainable_variables)
    slots = [v for v in model.optimizer.variables if v.value.dim()]
    assert slots and all(float(v.numpy().reshape(-1)[0]) == 6.0 for v in slots)
    assert all(v.value.grad is None for v in model.trainable_variables)


def _write() -> None:
    if sg.current_replica().index == 1:
        assert follower.state is not None
        (*_, steps) = follower.state.things["keras"].values()
        model = steps.adapter.model
        for v in model.trainable_variables:
            v.value.data.reshape(-1)[0] = 5.0
        for v in model.optimizer.variables:
            if v.value.dim():
                v.value.data.reshape(-1)[0] = 6.0


def test_frozen_between_calls(sharded: sg.ShardedStrategy) -> None:
    results = []
    x, y = numbers(27)
    for on in (None, sharded):
        model, _ = trained(on, net, ADAM, 27)
        model.layers[0].trainable = False
        with on.scope() if on is not None else nullcontext():
            model.compile(optimizer=ADAM(0.01), loss=model.loss)
        model.fit(x, y, batch_size=9, verbose=0, shuffle=False)
        results.append(model.get_weights())
    alike(*results, 1e-6)


def test_a_custom_loop(sharded: sg.ShardedStrategy) -> None:
    x, y = map(torch.as_tensor, numbers(27))

    def loop(prepare: Any) -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
        model = net()
        fresh = [w.copy() for w in model.get_weights()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(TensorDataset(x, y), batch_size=13)
        model, optimizer, loader = prepare(model, optimizer, loader)
        for _ in range(2):
            for rows, targets in loader:
                F.cross_entropy(model(rows), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return fresh, model.get_weights()

    fresh, one = loop(lambda *given: given)
    for _, found in sharded.run(loop, sharded.prepare):
        alike(one, found, 1e-6)
    assert max(abs(a - b).max() for a, b in zip(fresh, one, strict=True)) > 1e-3


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def own_step() -> Any:
    x = keras.Input((6,))
    return OwnStep(x, layers.Dense(3)(x))


def test_refusals(sharded: sg.ShardedStrategy) -> None:
    with pytest.raises(sg.NotDistributable, match="train_step of its own"):
        trained(sharded, own_step, ADAM, 9)
    with pytest.raises(sg.NotDistributable, match="use_ema"):
        trained(sharded, net, lambda: ADAM(use_ema=True), 9)
    doubles = layers.Dense(3, dtype="float64")
    with pytest.raises(sg.NotDistributable, match="share float32"):
        trained(sharded, lambda: keras.Sequential([keras.Input((6,)), doubles]), ADAM, 9)
