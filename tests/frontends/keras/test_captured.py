"""A captured step equals that of plain Keras on one device, and is dropped if it would not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import stratagem as sg
from stratagem.frontends.keras import captured_step, step_graph
from stratagem.frontends.keras.step_loop import StepLoop
from tests.clock import unless_late
from tests.frontends.keras.served_support import close_served, served
from tests.keras_support import apart, digits, history_apart, moved, strategy, train

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Runs(list[int]):
    """How many rows each captured step had."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found, plain = Runs(), step_graph.StepGraph.run

    def run(self: Any, tensors: Any, *more: Any) -> Any:
        found.append(len(tensors[0]))
        return plain(self, tensors, *more)

    loop = StepLoop.run

    def looped(self: Any, batches: Any, update: Any) -> Any:
        found.extend(len(batch[0]) for batch in batches)
        return loop(self, batches, update)

    monkeypatch.setattr(StepLoop, "run", looped)
    monkeypatch.setattr(captured_step, "AFTER", 2)
    monkeypatch.setattr(captured_step, "LONG_STEP", 60.0)  # a busy machine is slow
    monkeypatch.setattr(step_graph.StepGraph, "run", run)
    return found


def mlp() -> Any:
    hidden = layers.Dense(16, activation="tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input((8,)), hidden, layers.Dense(3)])


def normalised() -> Any:
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.LayerNormalization(),
            layers.Dense(3),
        ]
    )


def two_headed() -> Any:
    x = keras.Input((8,), name="x")
    h = layers.Dense(8, activation="relu")(x)
    return keras.Model(x, {"a": layers.Dense(3, name="a")(h), "b": layers.Dense(1, name="b")(h)})


def sgd(**more: Any) -> dict[str, Any]:
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return {"optimizer": optimizer, "loss": LOGITS, "metrics": ["accuracy"], **more}


def images(rows: int) -> Any:
    x, y = digits(rows, 72)
    return x.reshape(rows, 6, 6, 2), y


def two_targets() -> tuple[Any, Any]:
    x, y = digits(96)
    return x, {"a": y, "b": x[:, :1]}


def weights(rows: int) -> Any:
    return np.random.default_rng(3).uniform(0.1, 2.0, rows).astype("float32")


X, Y = digits(100)
IMAGES = images(100)
HEADS = two_targets()
CASES: dict[str, Any] = {
    "a last smaller batch": (mlp, sgd, {"x": X, "y": Y}),
    "sample weights": (
        mlp,
        lambda: sgd(weighted_metrics=["accuracy"]),
        {"x": X, "y": Y, "sample_weight": weights(100)},
    ),
    "class weights": (mlp, sgd, {"x": X, "y": Y, "class_weight": {0: 0.2, 1: 1.0, 2: 3.0}}),
    "moving statistics": (normalised, sgd, {"x": IMAGES[0], "y": IMAGES[1]}),
    "two losses": (
        two_headed,
        lambda: {"optimizer": "sgd", "loss": {"a": LOGITS, "b": "mse"}, "loss_weights": [1, 0.3]},
        {"x": HEADS[0], "y": HEADS[1]},
    ),
    "validation": (mlp, sgd, {"x": X, "y": Y, "validation_data": (X, Y)}),
    "a scaled loss": (
        mlp,
        lambda: sgd(optimizer=keras.optimizers.SGD(0.05, loss_scale_factor=8.0, clipnorm=0.5)),
        {"x": X, "y": Y},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_captured_step_is_that_of_plain_keras(runs: Runs, case: str) -> None:
    build, compiled, given = CASES[case]
    fit = {**given, "batch_size": 16, "epochs": 4}
    one, alone = train(build, compiled, fit)
    assert not runs
    ours, ran = train(build, compiled, fit, strategy(1))
    assert len(runs) > 10
    assert len(set(runs)) == 2 or case in ("two losses", "validation")  # another for the last batch
    assert moved(build, one) and apart(one, ours) < 1e-6 and history_apart(alone, ran) < 1e-6


class Changes(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function once, before a step in the middle of an epoch."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change, self.steps = change, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == 17:
            self.change(self.model)


def freeze(model: Any) -> None:
    model.layers[0].trainable = False


def half_rate(model: Any) -> None:
    model.optimizer.learning_rate = 0.01


def other_activation(model: Any) -> None:
    model.layers[0].activation = keras.activations.relu


def other_weights(model: Any) -> None:
    model.set_weights([w * 0.5 for w in model.get_weights()])


@pytest.mark.parametrize("change", [freeze, half_rate, other_activation, other_weights])
def test_what_callbacks_change_in_an_epoch_counts_at_once(runs: Runs, change: Any) -> None:
    fit = {"x": X, "y": Y, "batch_size": 10, "epochs": 4}
    one, alone = train(mlp, sgd, {**fit, "callbacks": [Changes(change)]})
    ours, ran = train(mlp, sgd, {**fit, "callbacks": [Changes(change)]}, strategy(1))
    assert not runs  # a callback acts between steps
    assert apart(one, ours) < 1e-6 and history_apart(alone, ran) < 1e-6
    assert apart(one, train(mlp, sgd, fit)[0]) > 1e-3


class AtEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function before the second epoch, when steps are captured."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.change(self.model)


def convolved() -> Any:
    first = layers.Rescaling(np.ones((6, 6, 2), "float32"))
    conv = layers.Conv2D(4, 3, padding="same", kernel_regularizer=keras.regularizers.L2(0.01))
    rest = [layers.BatchNormalization(), layers.Flatten(), layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((6, 6, 2)), first, conv, *rest])


def put(value: Any, name: str, *path: Any) -> Any:
    """Sets an attribute of a layer, or of what it holds."""

    def change(model: Any) -> None:
        owner = model if path and path[0] == "model" else model.layers[path[0]]
        for each in path[1:]:
            owner = getattr(owner, each)
        setattr(owner, name, value)

    return change


def scale_in_place(model: Any) -> None:
    model.layers[0].scale *= 4


def loss_of_logits(model: Any) -> None:
    model.loss._fn_kwargs["from_logits"] = True


def other_epsilon(model: Any) -> None:
    keras.config.set_epsilon(0.1)


CHANGES = {
    "a number": put(0.3, "momentum", 2),
    "l2": put(0.5, "l2", 1, "kernel_regularizer"),
    "regularizer": put(keras.regularizers.L1(0.5), "regularizer", 4, "kernel"),
    "activity": put(keras.regularizers.L2(0.5), "activity_regularizer", 1),
    "dilation": put((2, 2), "dilation_rate", 1),
    "list": put([0.5, 2.0], "scale", 0),
    "array": scale_in_place,
    "policy": put("mixed_bfloat16", "dtype_policy", 4),
    "loss": loss_of_logits,
    "compute_loss": put(lambda x, y, y_pred, *_, **__: (y_pred**2).mean(), "compute_loss", "model"),
    "epsilon": other_epsilon,
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_setting_is_followed(runs: Runs, change: str) -> None:
    found, epsilon = [], keras.config.epsilon()
    for where in (None, strategy(1)):
        calls = [AtEpoch(CHANGES[change])]
        fit = {"x": IMAGES[0], "y": IMAGES[1], "batch_size": 20, "epochs": 2, "callbacks": calls}
        loss = keras.losses.SparseCategoricalCrossentropy()
        try:
            found.append(train(convolved, lambda loss=loss: sgd(loss=loss), fit, where))
        finally:
            keras.config.set_epsilon(epsilon)
    (one, alone), (ours, ran) = found
    assert runs and apart(one, ours) < 1e-6 and history_apart(alone, ran) < 1e-6


def test_between_two_calls_anything_may_change(runs: Runs) -> None:
    models = []
    for where in (None, strategy(1)):
        model, _ = train(mlp, sgd, {"x": X, "y": Y, "batch_size": 10}, where)
        model.layers[0].trainable = False
        model.fit(X, Y, batch_size=10, verbose=0)
        model.layers[0].trainable = True
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        model.fit(X, X[:, :3], batch_size=10, verbose=0)
        models.append(model)
    assert len(runs) >= 3 * 7 and apart(*models) < 1e-6


def drops() -> Any:
    return keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, seed=1), layers.Dense(3)])


class OwnLayer(layers.Dense):  # type: ignore[misc]
    calls = 0

    def call(self, inputs: Any, training: Any = None) -> Any:
        OwnLayer.calls += 1
        return super().call(inputs) * (OwnLayer.calls % 2)


def own_layer() -> Any:
    return keras.Sequential([keras.Input((8,)), OwnLayer(3)])


def own_activation() -> Any:
    return keras.Sequential([keras.Input((8,)), layers.Dense(3, activation=lambda x: x * 2)])


def half() -> Any:
    return keras.Sequential([keras.Input((8,)), layers.Dense(3, dtype="mixed_bfloat16")])


class OwnOperation(keras.Operation):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x * 2

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def own_operation() -> Any:
    x, z = keras.Input((8,)), keras.Input((8,))
    inner = keras.Model(x, layers.Dense(8)(OwnOperation()(x)))
    return keras.Model(z, layers.Dense(3)(inner(z)))


def own_function() -> Any:
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(3)(keras.ops.map(lambda row: row * 2, x)))


def own_variable() -> Any:
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(3)(layers.Dense(8)(x) * keras.Variable(1.0)))


def sized_by_values() -> Any:
    x = keras.Input((8,))
    h = layers.Dense(8)(x)
    chosen = keras.ops.take(h, keras.ops.nonzero(h > 0.0)[0], axis=0)
    return keras.Model(x, layers.Dense(3)(h + keras.ops.mean(chosen)))


class OwnOptimizer(keras.optimizers.SGD):  # type: ignore[misc]
    """Keras makes one of it for each model, by its name."""


keras.saving.get_custom_objects()["OwnOptimizer"] = OwnOptimizer


@pytest.mark.parametrize(
    ("build", "more", "why"),
    [
        (drops, {}, "not captured"),
        (own_layer, {}, "not Keras' own"),
        (own_activation, {}, "not Keras' own"),
        (half, {}, "float32"),
        (mlp, {"run_eagerly": True}, "as it is written"),
        (mlp, {"metrics": [lambda y, p: p[:, 0]]}, "not Keras' own"),
        (mlp, {"loss": lambda y, p: (p**2).mean(-1)}, "not Keras' own"),
        (own_operation, {}, "not Keras' own"),
        (own_function, {}, "not Keras' own"),
        (own_variable, {}, "not the model's"),
        (sized_by_values, {}, "how large"),
        (mlp, {"loss_weights": [keras.Variable(0.5)]}, "not the model's"),
        (mlp, {"optimizer": {"class_name": "OwnOptimizer", "config": {}}}, "not Keras' own"),
    ],
)
def test_the_step_stays_as_it_is(
    runs: Runs, caplog: pytest.LogCaptureFixture, build: Any, more: Any, why: str
) -> None:
    with caplog.at_level(logging.DEBUG, logger="stratagem"):
        OwnLayer.calls = 0
        fit = {"x": X, "y": Y, "batch_size": 10}
        ours, _ = train(build, lambda: sgd(**more), fit, strategy(1))
    OwnLayer.calls = 0
    one, _ = train(build, lambda: sgd(**more), fit)
    assert not runs and why in caplog.text and apart(one, ours) < 1e-6


def test_a_graph_with_other_numbers_is_not_used(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = step_graph.scripted

    def off(graph: Any, inputs: Any) -> Any:
        program = plain(graph, inputs)
        return lambda *given: [each + 1e-7 for each in program(*given)]

    monkeypatch.setattr(step_graph, "scripted", off)
    with caplog.at_level(logging.DEBUG, logger="stratagem"):
        train(mlp, sgd, {"x": X, "y": Y, "batch_size": 10}, strategy(1))
    assert not runs and "other numbers" in caplog.text


def captured_here() -> int:
    """Count the graphs in use in this process."""
    found = [each for each in gc.get_objects() if type(each) is captured_step.CapturedStep]
    return sum(graph is not None for each in found for graph in each._graphs.values())


FIT = {"x": X, "y": Y, "batch_size": 10, "epochs": 4}


@pytest.mark.timeout(120)
def test_every_replica_captures_its_share() -> None:
    one, alone = train(mlp, sgd, FIT)
    ours, ran = train(mlp, sgd, FIT, strategy(2))
    captured = strategy(2).run(captured_here)
    unless_late(min(captured) >= 1, captured)  # no step that takes long is
    assert apart(one, ours) < 1e-6 and history_apart(alone, ran) < 1e-6


@pytest.fixture
def servers() -> Iterator[sg.ParameterServerStrategy]:
    yield served(sg.Synchronous(), workers=1)
    close_served()


@pytest.mark.timeout(120)
def test_servers_get_the_gradients_of_a_captured_step(servers: Any, runs: Runs) -> None:
    one, alone = train(mlp, sgd, FIT)
    ours, ran = train(mlp, sgd, FIT, servers)
    assert len(runs) > 20
    assert apart(one, ours) < 1e-6 and history_apart(alone, ran) < 1e-6


@pytest.mark.timeout(120)
def test_servers_and_a_model_without_metrics(servers: Any, runs: Runs) -> None:
    fit = {**FIT, "callbacks": [AtEpoch(put(0.5, "l2", 0, "kernel_regularizer"))]}
    one, _ = train(mlp, lambda: sgd(metrics=None), fit)
    ours, _ = train(mlp, lambda: sgd(metrics=None), fit, servers)
    assert runs and apart(one, ours) < 1e-6
