"""Law 1 for Keras: weights, history and metrics are those of one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.keras_support import apart, digits, history_apart, moved, strategy, train
from tests.spread import assert_work, watched

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp() -> Any:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(3),
        ]
    )


def cnn() -> Any:
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(momentum=0.8),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def recurrent(cell: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            cell(5),
            layers.Dense(3),
        ]
    )


def tagger() -> Any:
    """A mask that reaches the loss."""
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(4),
        ]
    )


def transformer() -> Any:
    tokens = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    attended = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(x + layers.Dense(8, activation="gelu")(x))
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def sentences(rows: int = 83) -> tuple[Any, Any]:
    dice = np.random.default_rng(1)
    x = dice.integers(1, 20, (rows, 7))
    for row, length in zip(x, dice.integers(2, 8, rows), strict=True):
        row[length:] = 0
    return x, dice.integers(0, 3, rows)


def pictures(rows: int = 75) -> tuple[Any, Any]:
    dice = np.random.default_rng(2)
    return dice.normal(size=(rows, 6, 6, 2)).astype("float32"), dice.integers(0, 3, rows)


def check(
    build: Any,
    compile: Any,
    fit: dict[str, Any],
    replicas: int,
    *,
    tolerance: float = 2e-6,
    **options: Any,
) -> None:
    where = strategy(replicas, **options)
    (alone, expected), here = watched(lambda: train(build, compile, fit))
    assert moved(build, alone)
    (spread, history), there = watched(lambda: train(build, compile, fit, where), where)
    assert_work(here, there)
    assert apart(alone, spread) < tolerance
    assert history_apart(expected, history) < max(1e-5, tolerance)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.7)
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_optimizers(name: str, replicas: int) -> None:
    x, y = digits()
    compile = lambda: {"optimizer": OPTIMIZERS[name](), "loss": LOGITS, "metrics": ["accuracy"]}  # noqa: E731
    check(
        mlp,
        compile,
        {"x": x, "y": y, "batch_size": 64, "epochs": 2, "validation_split": 0.2},
        replicas,
        tolerance=1e-5 if name == "rmsprop" else 2e-6,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("rows", "batch"), [(17, 16), (33, 16), (7, 5), (5, 1), (1, 4)])
def test_batches_that_do_not_divide(rows: int, batch: int, replicas: int) -> None:
    """A last batch smaller than the number of replicas leaves some of them without any example."""
    x, y = digits(rows)

    def compile():
        return {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
            "loss": LOGITS,
            "metrics": ["accuracy"],
        }

    check(mlp, compile, {"x": x, "y": y, "batch_size": batch, "epochs": 2}, replicas)


def adam(loss: Any = LOGITS, **more: Any) -> Any:
    """A large epsilon, because Adam turns the last bit of a small gradient into a whole step."""
    return lambda: {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3), "loss": loss, **more}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("replicas", [2, 3])
def test_cnn_with_synchronised_batchnorm(replicas: int) -> None:
    x, y = pictures()
    fit = {"x": x, "y": y, "batch_size": 16, "epochs": 2, "validation_data": (x[:9], y[:9])}
    check(cnn, adam(metrics=["accuracy"]), fit, replicas, tolerance=1e-5, sync_batchnorm=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: recurrent(layers.LSTM), id="lstm"),
        pytest.param(lambda: recurrent(layers.GRU), id="gru"),
        pytest.param(transformer, id="transformer"),
    ],
)
def test_sequences(build: Any, replicas: int) -> None:
    x, y = sentences()
    check(
        build, adam(metrics=["accuracy"]), {"x": x, "y": y, "batch_size": 16, "epochs": 2}, replicas
    )


REDUCTIONS = ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_mask_that_reaches_the_loss(reduction: str, weights: bool) -> None:
    """Each share has another number of unmasked steps."""
    x, _ = sentences()
    y = np.random.default_rng(3).integers(0, 4, x.shape)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    weight = np.random.default_rng(4).random(x.shape).astype("float32")
    more = {"sample_weight": weight} if weights else {}
    check(
        tagger,
        adam(loss, weighted_metrics=["accuracy"]),
        {"x": x, "y": y, "batch_size": 16, "epochs": 1, **more},
        3,
        tolerance=1e-5,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_sample_weights(reduction: str, replicas: int) -> None:
    x, y = digits(99)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    weight = np.random.default_rng(5).random(99).astype("float32")
    weight[:9] = weight[16:24] = weight[25:32] = 0.0  # whole shares without any weight
    fit = {"x": x, "y": y, "batch_size": 16, "epochs": 2, "sample_weight": weight, "shuffle": False}
    check(
        mlp,
        adam(loss, metrics=["accuracy"], weighted_metrics=["accuracy"]),
        fit,
        replicas,
        tolerance=1e-5,
    )


@pytest.mark.timeout(240)
def test_ignored_classes_are_a_mask_of_the_losses_own() -> None:
    x, y = digits(99)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
    check(mlp, adam(loss), {"x": x, "y": y, "batch_size": 16, "epochs": 2}, 3)


@pytest.mark.timeout(240)
def test_class_weights_and_shuffling_and_initial_epoch() -> None:
    x, y = digits(99)
    fit = {
        "x": x,
        "y": y,
        "batch_size": 16,
        "epochs": 3,
        "initial_epoch": 1,
        "class_weight": {0: 1.0, 1: 5.0, 2: 0.5},
    }
    check(mlp, adam(), fit, 2)


def branches() -> Any:
    a, b = keras.Input((8,), name="a"), keras.Input((3,), name="b")
    h = layers.Dense(6, activation="relu")(layers.Concatenate()([a, b]))
    return keras.Model(
        {"a": a, "b": b},
        {
            "kind": layers.Dense(3, name="kind")(h),
            "size": layers.Dense(1, name="size")(h),
        },
    )


@pytest.mark.timeout(240)
def test_several_inputs_and_outputs() -> None:
    x, y = digits(99)
    b = x[:, :3] * 2
    weight = {"kind": np.ones(99, "float32"), "size": np.linspace(0, 1, 99).astype("float32")}
    fit = {
        "x": {"a": x, "b": b},
        "y": {"kind": y, "size": x[:, :1]},
        "batch_size": 16,
        "epochs": 2,
        "sample_weight": weight,
    }
    losses = {"kind": LOGITS, "size": "mse"}
    check(
        branches,
        adam(
            losses,
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
        ),
        fit,
        3,
    )


class Penalised(keras.layers.Layer):
    """A loss of its own, averaged over the batch."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@pytest.mark.timeout(240)
def test_losses_that_layers_add() -> None:
    build = lambda: keras.Sequential(  # noqa: E731
        [
            keras.Input((8,)),
            layers.Dense(16, activity_regularizer="l2"),
            Penalised(),
            layers.Dense(3),
        ]
    )
    x, y = digits(99)
    check(build, adam(), {"x": x, "y": y, "batch_size": 16, "epochs": 2}, 3)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_mixed_precision(policy: str) -> None:
    """Half precision is exact in its own measure: sums are taken in another order."""
    build = lambda: keras.Sequential(  # noqa: E731
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh", dtype=policy),
            layers.Dense(3, dtype="float32" if policy != "float64" else policy),
        ]
    )
    x, y = digits(99)
    check(
        build,
        lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": LOGITS},
        {"x": x, "y": y, "batch_size": 16, "epochs": 2},
        2,
        tolerance=2e-6 if policy == "float64" else 2e-3,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_evaluate_and_predict(rows: int) -> None:
    x, y = digits(99)
    compile = adam(metrics=["accuracy"])
    alone, _ = train(mlp, compile, {"x": x, "y": y, "batch_size": 16})
    spread, _ = train(mlp, compile, {"x": x, "y": y, "batch_size": 16}, strategy(3))
    assert np.allclose(
        alone.predict(x[:rows], verbose=0), spread.predict(x[:rows], verbose=0), atol=1e-5
    )
    assert np.allclose(
        alone.evaluate(x[:rows], y[:rows], verbose=0),
        spread.evaluate(x[:rows], y[:rows], verbose=0),
        atol=1e-5,
    )
    assert np.allclose(
        alone.predict_on_batch(x[:rows]), spread.predict_on_batch(x[:rows]), atol=1e-5
    )


@pytest.mark.timeout(240)
def test_one_batch_at_a_time() -> None:
    x, y = digits(99)
    models = []
    for where in (None, strategy(3)):
        model, _ = train(mlp, adam(metrics=["accuracy"]), {"x": x, "y": y, "batch_size": 33}, where)
        said = [model.train_on_batch(x[i : i + 10], y[i : i + 10]) for i in range(0, 99, 10)]
        said += [model.test_on_batch(x[:7], y[:7]), model.test_on_batch(x[:2], y[:2])]
        models.append((model, said))
    (alone, expected), (spread, said) = models
    assert apart(alone, spread) < 1e-5
    assert np.allclose(expected, said, atol=1e-5)
