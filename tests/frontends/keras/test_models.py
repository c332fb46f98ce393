"""Every kind of model that Keras knows trains as on one device, or is refused in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import stratagem as sg
from stratagem.errors import NotDistributable, StratagemError
from stratagem.frontends.keras.model_pickle import copied
from tests.frontends.keras.served_support import close_served, served
from tests.keras_both import Scope, alike, both, compiled, mlp, outcome
from tests.keras_support import digits, strategy
from tests.support import cpus

X, Y = digits(51)
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 16, "epochs": 2, "verbose": 0}
ROOT = Path(__file__).parents[3]
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
pytestmark = pytest.mark.timeout(120)


def trains_alike(
    build: Any,
    replicas: int = 2,
    fit: dict[str, Any] | None = None,
    tolerance: float = 1e-5,
    **compile: Any,
) -> Any:
    """Trains twice, evaluates and predicts."""

    def play(scope: Scope) -> Any:
        fresh = {
            k: v() if k in ("optimizer", "metrics") and callable(v) else v
            for k, v in compile.items()
        }
        model = compiled(scope, build, **fresh)
        data = FIT | (fit or {})
        before = [w.copy() for w in model.get_weights()] if model.built else None
        found = model.fit(**data)
        if before is not None:
            moved = [
                np.abs(a - b).max()
                for a, b in zip(before, model.get_weights(), strict=True)
                if a.size
            ]
            assert max(moved) > 1e-4
        rest = [model.evaluate(data["x"], data["y"], verbose=0, batch_size=20)]
        rest.append(model.predict(data["x"], verbose=0, batch_size=17))
        again = model.fit(**(data | {"epochs": 1}))
        return [outcome(model, found), rest, outcome(model, again)]

    return both(play, replicas, tolerance)


def test_functions_that_keras_gives_to_a_layer_are_those_of_its_copy() -> None:
    """They hold the copy, and use Keras' module itself instead of a copy of its names."""
    layer = mlp().layers[0]
    copy = copied(layer)
    build = vars(copy)["build"]
    held = [cell.cell_contents for cell in build.__closure__]
    assert any(each is copy for each in held) and not any(each is layer for each in held)
    assert build.__globals__ is vars(layer)["build"].__globals__
    assert build.__wrapped__ == copy.build.__wrapped__ and build.__qualname__ == "Dense.build"


# --- how they are made ------------------------------------------------------------------------


def test_sequential_without_input() -> None:
    trains_alike(lambda: keras.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(3)]))


class Listed(keras.Model):
    """Layers in a list, a dict and a tuple, made in __init__ and in build."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(6, activation="tanh") for _ in range(2)]
        self.heads = {"a": layers.Dense(3), "b": [layers.Dense(3)]}
        self.pair = (layers.LayerNormalization(), mlp())

    def build(self, shape: Any) -> None:
        self.late = layers.Dense(8)
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        x = h = self.late(x)
        for block in self.blocks:
            h = block(h)
        return self.heads["a"](h) + self.heads["b"][0](h) + self.pair[1](self.pair[0](x))


def test_subclassed_and_unbuilt() -> None:
    trains_alike(Listed)


class Scored(keras.layers.Layer):
    """Keeps a tensor of its last call, as attention layers keep their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(6)
        self.scores: Any = None

    def call(self, x: Any) -> Any:
        found = self.inner(x)
        self.scores = ops.softmax(found)
        return found * self.scores


class Looking(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.scored, self.out = Scored(), layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(self.scored(x))


def test_a_layer_that_keeps_a_tensor_of_its_last_call() -> None:
    trains_alike(Looking)


class Marked(Looking):
    """Is marked as built before its layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.built = True


def test_a_built_model_with_layers_that_are_not() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope, Marked)
        return outcome(model, model.fit(**FIT))

    both(play)


def test_nested_models_and_shared_layers() -> None:
    def build() -> Any:
        x = keras.Input((8,))
        shared = layers.Dense(8, activation="tanh")
        inner = keras.Sequential(
            [keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(trainable=False)]
        )
        outer = keras.Model(x, inner(shared(shared(x))))
        return keras.Model(x, layers.Dense(3)(layers.Add()([outer(x), outer(x * 2)])))

    trains_alike(build)


class Twins(keras.Model):
    """A part and its clone, whose weights have the same paths."""

    def __init__(self) -> None:
        super().__init__()
        self.part = keras.Sequential([keras.Input((8,)), layers.Dense(6, "tanh"), layers.Dense(4)])
        self.twin = keras.models.clone_model(self.part)
        self.head = layers.Dense(3)
        self(X[:1])

    def call(self, x: Any) -> Any:
        return self.head(self.part(x) + self.twin(x))


class Follows(keras.callbacks.Callback):  # type: ignore[misc]
    """The clone becomes the mean of both, as a mean teacher does."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for mine, other in zip(self.model.twin.weights, self.model.part.weights, strict=True):
            mine.assign(0.5 * (mine + other))


PLACES: dict[str, Any] = {
    "mirrored": lambda: sg.MirroredStrategy(cpus(3)),
    "central": lambda: sg.CentralStorageStrategy(cpus(2)),
    "elastic": lambda: sg.MirroredStrategy(cpus(2), elastic=True),
    "sharded": lambda: sg.ShardedStrategy(cpus(2)),
    "served": lambda: sg.ParameterServerStrategy(
        sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous()
    ),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_weights_of_one_path(place: str, frozen: bool, tmp_path: Path) -> None:
    """Batches of 8, 8 and 5 rows; then the file that was saved is trained on."""

    def play(scope: Scope) -> Any:
        keras.utils.set_random_seed(7)
        with scope():
            model = Twins()
            model.twin.trainable = not frozen
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), LOGITS)
        fit = {"x": X[:21], "y": Y[:21], "batch_size": 8, "epochs": 2, "verbose": 0}
        model.fit(**fit, shuffle=False)
        first = model.get_weights()
        model.save_weights(tmp_path / "twins.weights.h5")
        model.set_weights([weight * 0 for weight in first])
        model.load_weights(tmp_path / "twins.weights.h5")
        model.fit(**fit, callbacks=[Follows()] if frozen else None)
        slots = [v.numpy() for v in model.optimizer.variables]
        return [first, model.get_weights(), slots]

    where = PLACES[place]()
    try:  # not watched: looking at a layer's parameters has Keras list them anew
        expected = play(nullcontext)
        alike(expected, play(where.scope))
        assert np.abs(expected[0][0] - expected[1][0]).max() > 1e-3
    finally:
        where.close()


def test_frozen_then_unfrozen() -> None:
    def play(scope: Scope) -> Any:
        def build() -> Any:
            model = mlp()
            model.layers[0].trainable = False
            return model

        model = compiled(scope, build)
        first = outcome(model, model.fit(**FIT))
        model.train_on_batch(X[:9], Y[:9])
        model.layers[0].trainable = True
        with scope():
            model.compile(keras.optimizers.SGD(0.05), LOGITS)
        model.train_on_batch(X[:9], Y[:9])
        return [first, outcome(model, model.fit(**FIT))]

    both(play, 3)


def test_unfrozen_and_recompiled_outside_the_scope() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.05), LOGITS, metrics=["accuracy"])
        model.fit(**FIT)
        model.layers[0].trainable = True
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), LOGITS)
        return outcome(model, model.fit(**FIT))

    both(play, 3)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("place", ["mirrored", "served"])
def test_nothing_to_train(place: str) -> None:
    """Keras counts, and trains nothing."""

    def build() -> Any:
        model = mlp()
        model.trainable = False
        return model

    def play(scope: Scope) -> Any:
        model = compiled(scope, build)
        history = model.fit(**FIT).history
        counted = [history["loss"], history["accuracy"], model.evaluate(X, Y, verbose=0)]
        return [*counted, model.predict(X, verbose=0)]

    if place == "mirrored":
        both(play, moves=False)
    else:
        scopes = nullcontext, served(sg.Synchronous()).scope
        alike(*(keras.utils.set_random_seed(7) or play(scope) for scope in scopes))
        close_served()


SCRIPT = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, torch
from keras import ops
import stratagem as sg
torch.set_num_threads(1)
SCALE = 0.5

class Twice(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight((shape[-1], 4), name="w")
    def call(self, x):
        return ops.tanh(torch.matmul(x, self.w.value) * SCALE)

class Mine(keras.Model):
    def __init__(self, **more):
        super().__init__(**more)
        self.a, self.b = Twice(), keras.layers.Dense(2)
        self.tracker = keras.metrics.Mean(name="seen")
    def call(self, x):
        return self.b(self.a(x))
    def train_step(self, data):
        logs = super().train_step(data)
        self.tracker.update_state(ops.ones((len(data[0]),)))
        return logs | {"seen": self.tracker.result()}

class Far(keras.losses.Loss):
    def call(self, y, p):
        return ops.mean(ops.abs(y - p) ** 1.5, axis=-1)

def near(y, p):
    return ops.mean(ops.cast(ops.abs(y - p) < SCALE, "float32"), axis=-1)

class Share(keras.metrics.Metric):
    def __init__(self, **more):
        super().__init__(**more)
        self.n = self.add_weight(name="n", initializer="zeros")
    def update_state(self, y, p, sample_weight=None):
        self.n.assign_add(ops.sum(ops.cast(p > 0, "float32")))
    def result(self):
        return self.n / 2

x = np.random.default_rng(0).normal(size=(50, 8)).astype("float32")
def run(scope):
    keras.utils.set_random_seed(3)
    with scope():
        model = Mine()
        model.compile("sgd", Far(), metrics=[near, Share(name="share")])
    h = model.fit(x, x[:, :2], batch_size=16, epochs=2, verbose=0)
    return [*model.get_weights(), *[np.asarray(v) for v in h.history.values()]]

from contextlib import nullcontext
a, b = run(nullcontext), run(sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope)
print("apart", max(float(np.abs(p - q).max()) for p, q in zip(a, b, strict=True)))
"""


@pytest.mark.slow
def test_classes_of_a_script(tmp_path: Path) -> None:
    """Everything is defined in `__main__`, and nothing is guarded."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5


def test_model_that_cannot_travel_is_refused() -> None:
    """One sentence that names the trouble, and the strategy can be used again."""
    model = compiled(strategy(2).scope)
    model.lock = threading.Lock()
    with pytest.raises(StratagemError, match="lock"):
        model.fit(**FIT)
    del model.lock
    model.fit(**FIT)


# --- losses and metrics -----------------------------------------------------------------------


def squared(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(ops.one_hot(y, 3) - p), axis=-1)


def squared_mean(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(ops.one_hot(y, 3) - p))


def squared_sum(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(ops.one_hot(y, 3) - p)) / 16


class Cubed(keras.losses.Loss):
    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(ops.one_hot(y, 3) - p) ** 3, axis=-1)


class Raw(keras.losses.Loss):
    """Overrides __call__, so that Keras averages nothing."""

    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return ops.mean(ops.square(ops.one_hot(y, 3) - p))


@pytest.mark.parametrize(
    "loss",
    [squared, squared_mean, Cubed(), Cubed(reduction="sum"), Raw()],
    ids=["function", "mean", "class", "class_sum", "own_call"],
)
def test_own_losses(loss: Any) -> None:
    trains_alike(mlp, loss=loss, optimizer=lambda: keras.optimizers.SGD(0.01))


def test_own_loss_that_sums_is_right_or_refused() -> None:
    """One number for a batch: is it a sum or a mean?"""
    try:
        trains_alike(mlp, loss=squared_sum)
    except NotDistributable as error:
        assert "mean" in str(error)


@pytest.mark.parametrize("loss", [keras.losses.Dice, keras.losses.Tversky])
def test_loss_of_the_whole_batch_is_right_or_refused(loss: Any) -> None:
    """A ratio of sums over the batch is no mean over its rows."""
    build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(3, activation="sigmoid")])  # noqa: E731
    try:
        trains_alike(build, loss=loss(), fit={"y": np.eye(3, dtype="float32")[Y]}, metrics=None)
    except NotDistributable as error:
        assert str(error)


class Tracking(keras.layers.Layer):
    """A metric inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.tracker.update_state(ops.mean(ops.abs(x), axis=-1))
        return x


def test_metric_inside_a_layer() -> None:
    trains_alike(lambda: keras.Sequential([keras.Input((8,)), Tracking(), layers.Dense(3)]))


def test_activity_regularizer() -> None:
    trains_alike(
        lambda: keras.Sequential(
            [keras.Input((8,)), layers.Dense(6, activity_regularizer="l2"), layers.Dense(3)]
        )
    )


def agree(y: Any, p: Any) -> Any:
    return ops.cast(ops.equal(y, ops.cast(ops.argmax(p, -1), y.dtype)), "float32")


def agree_mean(y: Any, p: Any) -> Any:
    return ops.mean(agree(y, p))


class Hits(keras.metrics.Metric):
    def __init__(self, name: str = "hits") -> None:
        super().__init__(name=name)
        self.hits = self.add_weight(name="hits", initializer="zeros")
        self.seen = self.add_weight(name="seen", initializer="ones", dtype="int32")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.hits.assign_add(ops.sum(agree(y, p)))
        self.seen.assign_add(len(y))

    def result(self) -> Any:
        return self.hits / ops.cast(self.seen, "float32")


def test_own_metrics() -> None:
    trains_alike(mlp, metrics=lambda: [agree, Hits()])


def test_metric_used_again() -> None:
    """It comes with what it has counted in another model."""
    metric = Hits()
    trains_alike(mlp, metrics=lambda: [metric])


def test_function_metric_of_one_number() -> None:
    """Keras counts a batch once, however many examples it has."""
    trains_alike(mlp, metrics=[agree_mean])


class Largest(keras.metrics.Metric):
    """A state that cannot be added up."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.top = self.add_weight(name="top", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.top.assign(ops.maximum(self.top, ops.max(p)))

    def result(self) -> Any:
        return self.top.value


class Remembering(keras.metrics.Metric):
    """A state that is no variable."""

    def __init__(self, name: str = "remembering") -> None:
        super().__init__(name=name)
        self.all: list[Any] = []

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.all.append(ops.convert_to_numpy(p))

    def reset_state(self) -> None:
        self.all = []

    def result(self) -> Any:
        return ops.convert_to_tensor(np.median(np.concatenate(self.all)) if self.all else 0.0)


@pytest.mark.parametrize("metric", [Largest, Remembering])
def test_metric_that_cannot_be_added_up_is_right_or_refused(metric: Any) -> None:
    try:
        trains_alike(mlp, metrics=lambda: [metric()])
    except NotDistributable as error:
        assert metric.__name__.lower() in str(error).lower()


def test_metrics_of_several_variables() -> None:
    soft = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(3, activation="softmax")])  # noqa: E731
    one_hot = np.eye(3, dtype="float32")[Y]
    metrics = keras.metrics
    trains_alike(
        soft,
        fit={"y": one_hot},
        loss="categorical_crossentropy",
        metrics=lambda: [
            metrics.AUC(num_thresholds=20),
            metrics.AUC(num_thresholds=11, multi_label=True),
            metrics.F1Score(),
            metrics.F1Score(average="macro", name="macro"),
            metrics.OneHotMeanIoU(3),
            metrics.R2Score(),
            metrics.TopKCategoricalAccuracy(2),
            metrics.Precision(),
            metrics.Recall(thresholds=[0.2, 0.5]),
            metrics.PrecisionAtRecall(0.5, num_thresholds=20),
            metrics.RootMeanSquaredError(),
            metrics.CosineSimilarity(),
            metrics.KLDivergence(),
            metrics.MeanRelativeError(normalizer=[1.0, 2.0, 3.0])
            if hasattr(metrics, "MeanRelativeError")
            else "mae",
            metrics.PearsonCorrelation(),
        ],
    )


def test_mean_iou() -> None:
    trains_alike(mlp, metrics=lambda: [keras.metrics.MeanIoU(3, sparse_y_pred=False)])


class Adding(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(8)

    def call(self, x: Any) -> Any:
        y = self.inner(x)
        self.add_loss(ops.mean(ops.square(x - y)))
        self.add_loss(0.01 * ops.sum(ops.square(self.inner.kernel)))
        return y


def test_add_loss_without_any_other() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(
            scope, lambda: keras.Sequential([keras.Input((8,)), Adding()]), loss=None, metrics=None
        )
        return [
            outcome(model, model.fit(X, batch_size=16, epochs=2, verbose=0)),
            model.evaluate(X, batch_size=16, verbose=0),
        ]

    both(play, 3)


def test_own_compute_loss_and_metrics() -> None:
    class Own(keras.Sequential):
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            return ops.mean(ops.square(ops.one_hot(y, 3) - y_pred)) + sum(self.losses)

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            logs["norm"] = ops.mean(ops.square(y_pred))
            return logs

    trains_alike(lambda: Own([keras.Input((8,)), layers.Dense(3, kernel_regularizer="l2")]))


def test_run_eagerly() -> None:
    trains_alike(mlp, run_eagerly=True)


def test_settings_of_keras_reach_every_replica() -> None:
    before = keras.config.epsilon(), keras.config.floatx()
    try:
        keras.config.set_epsilon(0.05)
        keras.config.set_floatx("float64")
        soft = lambda: keras.Sequential(  # noqa: E731
            [layers.Dense(4), layers.Dense(3, activation="softmax")]
        )
        trains_alike(soft, loss="sparse_categorical_crossentropy")
    finally:
        keras.config.set_epsilon(before[0])
        keras.config.set_floatx(before[1])


def test_dtype_policy_of_layers_that_are_built_late() -> None:
    class Late(keras.Model):
        def build(self, shape: Any) -> None:
            self.inner = layers.Dense(3)
            self.inner.build(shape)

        def call(self, x: Any) -> Any:
            return self.inner(x)

    keras.config.set_dtype_policy("float64")
    try:
        trains_alike(Late)
    finally:
        keras.config.set_dtype_policy("float32")


# --- own steps --------------------------------------------------------------------------------


class OwnStep(keras.Model):
    """As in Keras' guide for torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.mean = keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        loss = self.step(x, y)
        self.mean.update_state(loss, sample_weight=len(x))
        return {"loss": self.mean.result()}

    def step(self, x: Any, y: Any) -> Any:
        p = self(x, training=True)
        self.zero_grad()
        loss = LOGITS(y, p)
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return loss

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.mean.update_state(LOGITS(y, self(x, training=False)), sample_weight=len(x))
        return {"loss": self.mean.result()}

    def predict_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        return {"p": ops.softmax(self(x)), "top": (ops.argmax(self(x), -1), x[:, 0])}

    @property
    def metrics(self) -> Any:
        return [self.mean]


def test_own_steps_with_an_own_metric() -> None:
    trains_alike(OwnStep, loss=None, metrics=None)


class Guided(keras.Model):
    """The step of Keras' guide, with the metrics that `compile` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        p = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=p)
        self.zero_grad()
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=len(x))
            else:
                metric.update_state(y, p)
        return {m.name: m.result() for m in self.metrics}


def test_step_of_the_guide() -> None:
    trains_alike(Guided)


class Plain(OwnStep):
    """Numbers that no metric holds."""

    def train_step(self, data: Any) -> Any:
        loss = self.step(*data)
        return {"value": loss, "half": loss.detach() / 2}

    def test_step(self, data: Any) -> Any:
        return {"value": LOGITS(data[1], self(data[0]))}

    metrics = property(lambda self: [])


def test_own_steps_without_metrics() -> None:
    trains_alike(Plain, loss=None, metrics=None)


class Mixed(OwnStep):
    """A running metric and a number that no metric holds."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data) | {"rows": ops.mean(data[0])}


def test_own_steps_that_mix_metrics_and_numbers() -> None:
    trains_alike(Mixed, loss=None, metrics=None)


class Asking(OwnStep):
    """autograd.grad instead of backward: no hook hears it."""

    def step(self, x: Any, y: Any) -> Any:
        loss = LOGITS(y, self(x, training=True))
        weights = list(self.trainable_weights)
        found = torch.autograd.grad(loss, [w.value for w in weights])
        with torch.no_grad():
            self.optimizer.apply(list(found), weights)
        return loss


def test_gradients_taken_by_autograd_grad_are_right_or_refused() -> None:
    try:
        trains_alike(Asking, loss=None, metrics=None)
    except NotDistributable as error:
        assert "backward" in str(error)


class Penalty(OwnStep):
    """A gradient of the inputs inside the loss."""

    def step(self, x: Any, y: Any) -> Any:
        x = x.clone().requires_grad_(True)
        p = self(x, training=True)
        (slope,) = torch.autograd.grad(p.sum(), x, create_graph=True)
        self.zero_grad()
        loss = LOGITS(y, p) + (slope**2).sum(-1).mean()
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return loss


def test_gradient_penalty() -> None:
    trains_alike(Penalty, loss=None, metrics=None)


class Gan(keras.Model):
    """Two optimizers, two backward passes a step; its noise comes from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(8)])
        self.discriminator = keras.Sequential(
            [keras.Input((8,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
        )
        self.d_mean, self.g_mean = keras.metrics.Mean(name="d"), keras.metrics.Mean(name="g")
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data: Any) -> Any:
        real = data[0] if isinstance(data, tuple) else data
        rows = len(real)
        noise = real[:, :4] ** 2
        fake = self.generator(noise)
        both = ops.concatenate([fake.detach(), real])
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
        self.zero_grad()
        d_loss = self.loss_fn(labels, self.discriminator(both))
        d_loss.backward()
        weights = list(self.discriminator.trainable_weights)
        with torch.no_grad():
            self.d_optimizer.apply([w.value.grad for w in weights], weights)
        self.zero_grad()
        g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(noise)))
        g_loss.backward()
        weights = list(self.generator.trainable_weights)
        with torch.no_grad():
            self.g_optimizer.apply([w.value.grad for w in weights], weights)
        self.d_mean.update_state(d_loss, sample_weight=rows)
        self.g_mean.update_state(g_loss, sample_weight=rows)
        return {"d": self.d_mean.result(), "g": self.g_mean.result()}

    metrics = property(lambda self: [self.d_mean, self.g_mean])


def test_gan() -> None:
    def play(scope: Scope) -> Any:
        with scope():
            model = Gan()
            model.compile(
                keras.optimizers.Adam(0.01, epsilon=1e-3), keras.optimizers.SGD(0.1, momentum=0.9)
            )
        lower = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: model.d_optimizer.learning_rate.assign(
                0.01 / (epoch + 1)
            )
        )
        results = []
        for _ in range(2):
            found = model.fit(X, batch_size=16, epochs=2, verbose=0, callbacks=[lower])
            results.append(outcome(model, found))
        return results

    both(play, 3)


def test_step_set_on_the_instance() -> None:
    """Either it is played, or it is refused; never dropped."""

    def play(scope: Scope) -> Any:
        model = mlp()
        own = model.train_step

        def train_step(data: Any) -> Any:
            x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
            return own((x * 0.5, y))

        model.train_step = train_step
        with scope():
            model.compile(keras.optimizers.SGD(0.1), LOGITS)
        return outcome(model, model.fit(**FIT))

    try:
        both(play)
    except StratagemError as error:
        assert "train_step" in str(error)


# --- layers with a state or dice --------------------------------------------------------------


def dropped(seed: int | None = None) -> Any:
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(16), layers.Dropout(0.5, seed=seed), layers.Dense(3)]
    )


class Shaken(keras.layers.Layer):
    """Dice that no seed generator holds."""

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        return x + keras.random.normal(ops.shape(x)) + torch.rand(x.shape)


@pytest.mark.parametrize(
    "build",
    [
        dropped,
        lambda: dropped(7),
        lambda: keras.Sequential([keras.Input((8,)), Shaken(), layers.Dense(3)]),
    ],
    ids=["dropout", "seeded", "own_dice"],
)
def test_dice_repeat_from_one_seed(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Noise is told once for each model; a dropout's masks are not."""

    def run() -> Any:
        keras.utils.set_random_seed(3)
        model = compiled(strategy(2).scope, build)
        model.fit(**FIT)
        return outcome(model, model.fit(**FIT))

    first, again = run(), run()
    for a, b in zip(first[0], again[0], strict=True):
        assert np.array_equal(a, b)
    noisy = any(isinstance(layer, Shaken) for layer in build().layers)
    assert caplog.text.count("draws random numbers (noise") == (2 if noisy else 0)


class Witness(keras.layers.Layer):
    """Dropout's own result for inputs of one: the penalty is zero if replicas drop alike."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.drop = layers.Dropout(0.5, seed=seed)
        self.w = self.add_weight((64,), initializer="zeros")

    def call(self, x: Any, training: bool = False) -> Any:
        return ops.sum(self.drop(ops.ones((len(x), 64)), training=training) * self.w, -1)


@pytest.mark.parametrize("seed", [None, 7])
def test_masks_differ_between_replicas(seed: int | None) -> None:
    """One example a replica: with equal masks the gradient would be 0 or 2 everywhere."""
    keras.utils.set_random_seed(1)
    with strategy(2).scope():
        model = keras.Sequential([keras.Input((8,)), Witness(seed)])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: -p)
    model.fit(X[:2], Y[:2], verbose=0)
    kinds = set(np.round(model.get_weights()[0], 3).tolist())
    assert kinds == {0.0, 1.0, 2.0}


def test_masks_change_from_step_to_step() -> None:
    keras.utils.set_random_seed(1)
    with strategy(2).scope():
        model = keras.Sequential([keras.Input((8,)), Witness(None)])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: -p)
    model.fit(X[:16], Y[:16], batch_size=2, verbose=0)
    model.fit(X[:16], Y[:16], batch_size=2, verbose=0)
    assert len(set(np.round(model.get_weights()[0], 3).tolist())) > 6


def test_batchnorm_without_synchronisation_averages_its_statistics() -> None:
    """One step: the moving statistics are the mean of what the two halves say."""
    with strategy(2).scope():
        model = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(momentum=0.5)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X[:16], X[:16], shuffle=False, batch_size=16, verbose=0)
    mean, var = model.get_weights()[2:]
    halves = X[:8], X[8:16]
    np.testing.assert_allclose(mean, sum(h.mean(0) for h in halves) / 4, atol=1e-5)
    np.testing.assert_allclose(var, 0.5 + sum(h.var(0) for h in halves) / 4, atol=1e-5)


@pytest.mark.parametrize("rows", [17, 34])
def test_synchronised_batchnorm_with_replicas_that_have_no_example(rows: int) -> None:
    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(4),
                layers.BatchNormalization(momentum=0.5),
                layers.Dense(3),
            ]
        )

    def run(scope: Scope) -> Any:
        keras.utils.set_random_seed(7)
        model = compiled(scope, build, optimizer=keras.optimizers.SGD(0.05))
        found = model.fit(X[:rows], Y[:rows], batch_size=16, epochs=3, verbose=0)
        return outcome(model, found)

    alike(run(nullcontext), run(strategy(3, sync_batchnorm=True).scope), 1e-4)


@pytest.mark.parametrize("rows", [51, 50])
def test_spectral_normalization(rows: int) -> None:
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((8,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(3)]
    )
    trains_alike(build, fit={"x": X[:rows], "y": Y[:rows]}, tolerance=1e-4)


class Counting(keras.layers.Layer):
    """A weight that counts steps, whole and broken ones."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.add_weight((), initializer="zeros", trainable=False)
        self.whole = self.add_weight((), initializer="zeros", trainable=False, dtype="int32")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1.0)
            self.whole.assign_add(1)
        return x * (1 + 0.1 * self.steps)


@pytest.mark.parametrize("rows", [51, 50])
def test_layer_that_counts_steps(rows: int) -> None:
    """Also when a replica has no example in the last step."""
    build = lambda: keras.Sequential([keras.Input((8,)), Counting(), layers.Dense(3)])  # noqa: E731
    trains_alike(
        build,
        fit={"x": X[:rows], "y": Y[:rows]},
        optimizer=lambda: keras.optimizers.SGD(0.01),
        tolerance=1e-4,
    )


class Watching(keras.Model):
    """A step sets two variables from the rows of the batch, and a third from weights."""

    def __init__(self, state: Any = ops.mean, dtype: str = "float32") -> None:
        super().__init__()
        self.dense, self.state = layers.Dense(3), state
        kinds = {"trainable": False, "initializer": "zeros"}
        self.size = self.add_weight((), dtype=dtype, **kinds)
        self.mean = self.add_weight((8,), **kinds)
        self.copy = self.add_weight((3,), **kinds)

    def call(self, x: Any) -> Any:
        return self.dense(x - ops.stop_gradient(self.mean))

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        x = data[0].detach()
        self.size.assign(0.9 * self.size + 0.1 * self.state(x**2))
        self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(x, axis=0))
        self.copy.assign(0.9 * self.copy + 0.1 * self.dense.bias)
        return {"loss": logs["loss"], "size": float(self.size), "held": self.size.value}


@pytest.mark.parametrize(("rows", "replicas"), [(37, 2), (37, 3), (33, 2), (35, 3)])
def test_variables_that_a_step_sets_to_means_over_rows(rows: int, replicas: int) -> None:
    """The next step starts from those of one device, and logs are the variables' values."""
    fit = {"x": X[:rows] * np.linspace(0.1, 3, rows, dtype="float32")[:, None], "y": Y[:rows]}
    trains_alike(Watching, replicas, fit)


class Beside(keras.Model):
    """A step sets what no optimizer steps, a weight of Keras' layer, and one from gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.level = layers.Dense(3), keras.Variable(0.1)
        self.table = layers.Embedding(1, 8, trainable=False)
        self.table.build(None)
        self.norm = self.add_weight((), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        table = ops.stop_gradient(self.table.embeddings)[0]
        return self.dense(x * (1 + self.level.value.detach()) - table)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        loss.backward()
        weights = self.dense.trainable_weights
        gradients = [v.value.grad for v in weights]
        with torch.no_grad():
            norm = sum((each**2).sum() for each in gradients)
            self.norm.assign(0.9 * self.norm + 0.1 * norm)
            self.optimizer.apply([each / (1 + self.norm) for each in gradients], weights)
            self.level.assign(0.9 * self.level + 0.1 * ops.mean(x**2))
            before = self.table.embeddings
            self.table.embeddings.assign(0.9 * before + 0.1 * ops.mean(x, axis=0)[None])
        return {"loss": loss.detach()}


@pytest.mark.parametrize(("rows", "replicas"), [(37, 2), (33, 2), (35, 3)])
def test_variables_beside_those_that_are_trained(rows: int, replicas: int) -> None:
    """Also if Keras calls them trainable, and in its own layers; gradients are alike anyway."""
    fit = {"x": X[:rows] * np.linspace(0.1, 3, rows, dtype="float32")[:, None], "y": Y[:rows]}
    trains_alike(Beside, replicas, fit, optimizer=lambda: keras.optimizers.SGD(0.05))


def test_variables_of_replicas_that_meet_after_a_step_are_refused() -> None:
    model = compiled(strategy(2, sync=sg.LocalSteps(1)).scope, Watching)
    with pytest.raises(NotDistributable, match=r"leave sync=LocalSteps\(every=1\) out, or set 'w"):
        model.fit(**FIT)


@pytest.mark.parametrize("state", [ops.sum, ops.max, len], ids=["sum", "maximum", "count"])
def test_a_variable_set_to_something_else_is_refused(state: Any) -> None:
    model = compiled(strategy(2).scope, lambda: Watching(state))
    with pytest.raises(NotDistributable, match=r"sets 'watching.*/variable.* not a mean over"):
        model.fit(**FIT)


def test_a_whole_number_set_from_rows_is_refused() -> None:
    """It was alike in the rows that were tried."""
    more = lambda x: 10.0 * (x[-1, 0] > 1)  # noqa: E731
    model = compiled(strategy(2).scope, lambda: Watching(more, "int32"))
    x = np.zeros_like(X)
    x[15] = 2.0
    with pytest.raises(NotDistributable, match=r"of type int32, from the rows.*each replica has"):
        model.fit(**FIT | {"x": x, "shuffle": False})


def test_a_mean_over_rows_is_refused_on_servers() -> None:
    model = compiled(served(sg.Synchronous(), 2, 1).scope, Watching)
    with pytest.raises(NotDistributable, match="from their rows or gradients, or counts"):
        model.fit(**FIT)


def test_steps_that_a_worker_without_rows_does_not_count_are_told() -> None:
    build = lambda: keras.Sequential([keras.Input((8,)), Counting(), layers.Dense(3)])  # noqa: E731
    model = compiled(served(sg.Synchronous(), 2, 1).scope, build)
    with pytest.raises(NotDistributable, match="a worker without a row of a batch makes no step"):
        model.fit(**FIT | {"x": X[:17], "y": Y[:17]})


def test_normalization_and_rescaling() -> None:
    def build() -> Any:
        norm = layers.Normalization()
        norm.adapt(X)
        return keras.Sequential([keras.Input((8,)), norm, layers.Rescaling(0.5), layers.Dense(3)])

    trains_alike(build)


def test_augmentation_layers_travel() -> None:
    """Each picture is turned by dice; in prediction they lie still."""
    x = np.random.default_rng(0).random((20, 6, 6, 3)).astype("float32")

    def play(scope: Scope) -> Any:
        model = compiled(
            scope,
            lambda: keras.Sequential(
                [
                    keras.Input((6, 6, 3)),
                    layers.RandomFlip(),
                    layers.RandomRotation(0.1),
                    layers.RandomContrast(0.1),
                    layers.Resizing(5, 5),
                    layers.CenterCrop(4, 4),
                    layers.Flatten(),
                    layers.Dense(3),
                ]
            ),
        )
        before = model.predict(x, verbose=0)
        model.fit(x, Y[:20], verbose=0)
        return before

    both(play)


@pytest.mark.parametrize("option", [{"jit_compile": True}, {"steps_per_execution": 4}])
def test_options_that_cannot_be_kept_are_refused(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises((NotDistributable, ValueError), match=name):
        compiled(strategy(2).scope, **option).fit(**FIT)
    compiled(strategy(2).scope).fit(**FIT)


# --- torch inside -----------------------------------------------------------------------------


class Torchy(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Tanh())
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(self.inner(x))


def test_torch_modules_inside() -> None:
    trains_alike(Torchy)


def test_torch_module_wrapper() -> None:
    trains_alike(
        lambda: keras.Sequential(
            [
                keras.Input((8,)),
                layers.TorchModuleWrapper(torch.nn.Linear(8, 5), output_shape=(None, 5)),
                layers.Dense(3),
            ]
        )
    )


class Bare(keras.Model):
    """A torch parameter that no Keras variable holds."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3)
        self.scale = torch.nn.Parameter(torch.ones(3))

    def call(self, x: Any) -> Any:
        return self.out(x) * self.scale


def test_bare_torch_parameter_is_right_or_refused() -> None:
    try:
        trains_alike(Bare)
    except StratagemError as error:
        assert str(error)


def test_torch_batchnorms_buffers_are_averaged() -> None:
    """Not a Keras variable, and still a moving statistic."""
    with strategy(2).scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.TorchModuleWrapper(
                    torch.nn.BatchNorm1d(8, momentum=0.5), output_shape=(None, 8)
                ),
            ]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X[:16], X[:16], shuffle=False, batch_size=16, verbose=0)
    mean = model.layers[0].module.running_mean.numpy()
    np.testing.assert_allclose(mean, X[:16].mean(0) / 2, atol=1e-5)


def test_lora() -> None:
    def build() -> Any:
        model = mlp()
        model.layers[0].enable_lora(2)
        return model

    trains_alike(build)


def test_quantized_prediction() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.fit(**FIT)
        model.quantize("int8")
        return model.predict(X, verbose=0)

    both(play, 2, 2e-2)


# --- sequences --------------------------------------------------------------------------------


def series(rows: int = 51) -> Any:
    dice = np.random.default_rng(1)
    x = dice.normal(size=(rows, 3, 4)).astype("float32")
    for row, length in zip(x, dice.integers(1, 4, rows), strict=True):
        row[length:] = 0.0
    return x


@pytest.mark.parametrize(
    "build",
    [
        lambda: keras.Sequential([keras.Input((3, 4)), layers.Masking(), layers.LSTM(3)]),
        lambda: keras.Sequential(
            [
                keras.Input((3, 4)),
                layers.TimeDistributed(layers.Dense(4)),
                layers.Flatten(),
                layers.Dense(3),
            ]
        ),
        lambda: keras.Sequential(
            [
                keras.Input((3, 4)),
                layers.Masking(),
                layers.Bidirectional(layers.GRU(3)),
                layers.Dense(3),
            ]
        ),
        lambda: keras.Sequential(
            [keras.Input((3, 4)), layers.RNN([layers.LSTMCell(3), layers.GRUCell(3)])]
        ),
        lambda: keras.Sequential(
            [keras.Input((3, 4)), layers.Conv1D(4, 2), layers.GlobalMaxPooling1D(), layers.Dense(3)]
        ),
    ],
    ids=["masking", "time_distributed", "bidirectional", "cells", "conv"],
)
def test_series(build: Any) -> None:
    trains_alike(build, fit={"x": series()})


def test_stateful_rnn_is_right_or_refused() -> None:
    """Its state has a row for each example of the global batch."""
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input(batch_shape=(10, 3, 4)), layers.LSTM(3, stateful=True)]
    )
    x = series(50)

    def play(scope: Scope) -> Any:
        model = compiled(scope, build)
        return [
            model.predict(x, batch_size=10, verbose=0),
            model.evaluate(x, Y[:50], batch_size=10, verbose=0),
        ]

    try:
        both(play)
    except NotDistributable as error:
        assert "stateful" in str(error)


def test_fixed_batch_size() -> None:
    """A model made for batches of ten sees shares of them."""

    def play(scope: Scope) -> Any:
        model = compiled(
            scope, lambda: keras.Sequential([keras.Input(batch_shape=(10, 8)), layers.Dense(3)])
        )
        found = model.fit(X[:50], Y[:50], batch_size=10, verbose=0)
        return [outcome(model, found), model.predict(X[:50], batch_size=10, verbose=0)]

    both(play)


# --- outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "nested"])
def test_outputs_of_predict(kind: str) -> None:
    def build() -> Any:
        x = keras.Input((8,))
        a, b = layers.Dense(2, name="a")(x), layers.Dense(3, name="b")(x)
        shapes = {
            "list": [a, b],
            "dict": {"a": a, "b": b},
            "tuple": (a, b),
            "nested": {"a": [a], "b": {"c": b}},
        }
        return keras.Model(x, shapes[kind])

    def play(scope: Scope) -> Any:
        model = compiled(scope, build, loss=None, metrics=None)
        found = model.predict(X, batch_size=7, verbose=0)
        one = model.predict_on_batch(X[:2])
        return [
            str(keras.tree.map_structure(np.shape, found)),
            found,
            str(keras.tree.map_structure(np.shape, one)),
            one,
        ]

    both(play, 3, moves=False)


class Faulty(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        if float(ops.max(x)) > 50:
            raise ArithmeticError("a value above fifty")
        return x


@pytest.mark.parametrize("row", [0, 15])
def test_exception_in_one_replicas_layer(row: int) -> None:
    """Wherever the row lies that brings it about, one learns its reason."""
    x = X.copy()
    x[row] = 99.0
    model = compiled(
        strategy(2).scope, lambda: keras.Sequential([keras.Input((8,)), Faulty(), layers.Dense(3)])
    )
    with pytest.raises(Exception, match="above fifty"):
        model.fit(x, Y, batch_size=16, shuffle=False, verbose=0)
    model.fit(**FIT)
