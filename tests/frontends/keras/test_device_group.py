"""Several devices of one worker of parameter servers share a Keras model's batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.served_support import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SCRIPT = """
import contextlib
import keras
import numpy as np

where = sg.ParameterServerStrategy(
    updates=sg.Synchronous() if workers > 1 else sg.Asynchronous(),
    devices=["cpu:0", "cpu:1", "cpu:2"] if first else ["cpu:0", "cpu:1"],
)
x, y = x.numpy()[:301], y.numpy()[:301]  # the last batch has a single row
dice = np.random.default_rng(0)
words = dice.integers(0, 20, (301, 7)) * (np.arange(7) < dice.integers(1, 8, (301, 1)))
weights = dice.random(301).astype("float32")
many = dice.random((301, 7)).astype("float32")


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = keras.layers.Dense(16, "relu"), keras.layers.Dense(10)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        return self.outer(self.inner(x))

    @property
    def metrics(self):
        return [self.seen]

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
        )
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        self.seen.update_state(loss)
        return {"seen": self.seen.result(), "pixels": x.mean()}


class Halve(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel * 0.9)


def made(kind):
    keras.utils.set_random_seed(3)
    if kind == "own":
        return Own()
    if kind.startswith("mask"):
        layers = [keras.layers.Embedding(20, 8, mask_zero=True), keras.layers.Dense(20)]
        return keras.Sequential([keras.Input((7,)), *layers])
    layers = [keras.layers.Dense(32, "relu", activity_regularizer="l2"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


def train(kind, strategy):
    reduction = "sum" if kind == "sum" else "sum_over_batch_size"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = made(kind)
        model.compile(
            keras.optimizers.Adam(0.01), None if kind == "own" else loss,
            metrics=None if kind == "own" else ["accuracy"],
            weighted_metrics=["accuracy"] if kind == "weights" else None,
        )
    keras.utils.set_random_seed(5)
    options = {"epochs": 2, "batch_size": 50, "verbose": 0}
    if "weights" in kind:
        options["sample_weight"] = weights if kind == "weights" else many
    if kind == "callback":
        options["callbacks"] = [Halve()]
    data = (words, words) if kind.startswith("mask") else (x, y)
    history = model.fit(*data, **options).history
    if kind == "callback":  # once more, with the state that the servers had
        history = model.fit(*data, **options).history
    return model, history


kinds = ["sum", "weights", "mask", "own", "callback"] + (["mask, weights"] if workers == 1 else [])
for kind in kinds:
    (model, history), (plain, expected) = train(kind, where), train(kind, None)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        assert np.abs(ours - theirs).max() < 2e-5, (kind, np.abs(ours - theirs).max())
    if first:
        for key, values in expected.items():
            assert np.allclose(history[key], values, rtol=1e-4), (kind, key, history[key], values)
        assert set(where.stats().by_worker) == set(range(workers))
if first:
    print("as one device")
"""


MIXING = """
import keras

where = sg.ParameterServerStrategy(updates=sg.Asynchronous(), devices=["cpu:0", "cpu:1"])


class Centred(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


with where.scope():
    model = keras.Sequential([keras.Input((64,)), Centred(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x.numpy(), y.numpy(), batch_size=50, verbose=0)
"""


def test_rows_that_depend_on_those_of_another_device(tmp_path: Path) -> None:
    """A worker has whole batches, and its devices have shares."""
    assert "NotDistributable: the model's outputs for a row depend" in launch(
        MIXING, 1, tmp_path, code=1
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_the_devices_of_a_worker_share_its_batches(workers: int, tmp_path: Path) -> None:
    assert "as one device" in launch(SCRIPT, workers, tmp_path)
