"""Keras models: each built, compiled and fitted once as written, plainly and in a scope."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.conformance.net import UNSYNCED, Cases, Result

case = Cases("mirrored 3")
BATCH = 8
#: of Keras' variables, which are float32: sums of other orders, a few steps long
TIGHT = (2e-6, 2e-6)
ADAPTIVE = (1e-5, 1e-5)


@dataclass
class Training:
    """What a script does with Keras."""

    model: Any
    x: Any
    y: Any
    optimizer: Any = field(default_factory=lambda: keras.optimizers.SGD(0.2, momentum=0.9))
    loss: Any = field(
        default_factory=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    #: further arguments of `compile` and of `fit`
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    #: whether `evaluate` and `predict` are compared, too
    judged: bool = True
    #: called with the model afterwards: more named values
    after: Callable[[Any], Result] | None = None


def net(*inner: Any) -> Any:
    inner = inner or (layers.Dense(6, "tanh"),)
    return keras.Sequential([layers.Input((5,)), *inner, layers.Dense(4)])


def data(rows: int = 19) -> tuple[Any, Any]:
    dice = np.random.default_rng(7)
    return dice.normal(size=(rows, 5)).astype("float32"), dice.integers(0, 4, rows)


def play(name: str, strategy: sg.Strategy | None = None) -> Result:
    """Build, compile, fit, evaluate, predict; weights, history and results."""
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy is not None else nullcontext():
        job: Training = case[name].play()
        job.model.compile(optimizer=job.optimizer, loss=job.loss, **job.compile)
    options = {"epochs": job.epochs, "shuffle": False, "verbose": 0, **job.fit}
    given = options.pop("data", (job.x, job.y))
    if len(given) > 1:
        options.setdefault("batch_size", BATCH)
    history = job.model.fit(*given, **options).history
    found: Result = {name: np.asarray(values) for name, values in history.items()}
    if job.judged:
        judged = job.model.evaluate(job.x, job.y, batch_size=BATCH, verbose=0, return_dict=True)
        found |= {f"evaluated {name}": value for name, value in judged.items()}
        outputs = job.model.predict(job.x, batch_size=BATCH, verbose=0)
        named = outputs if isinstance(outputs, dict) else {"": outputs}
        found |= {f"predicted {name}": output for name, output in named.items()}
    if job.after is not None:
        with strategy.scope() if strategy is not None else nullcontext():
            found |= job.after(job.model)
    weights = {f"{i} {v.name}": v.numpy() for i, v in enumerate(job.model.weights)}
    return found | weights


@case("batches that do not divide", tolerance=TIGHT)
def _() -> Training:
    return Training(net(), *data(), compile={"metrics": ["accuracy"]})


@case("fewer rows than replicas", tolerance=TIGHT, borrows=True)
def _() -> Training:
    return Training(net(), *data(11), fit={"batch_size": 3})


@case("batches from a generator", tolerance=TIGHT)
def _() -> Training:
    x, y = data()
    return Training(net(), x, y, fit={"data": (endless(x, y),), "steps_per_epoch": 3})


def endless(x: Any, y: Any) -> Iterator[Any]:
    while True:
        for i in range(0, len(y), BATCH):
            yield x[i : i + BATCH], y[i : i + BATCH]


@case("batches from a loader", tolerance=TIGHT)
def _() -> Training:
    x, y = data()
    rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return Training(net(), x, y, fit={"data": (DataLoader(rows, batch_size=BATCH),)})


@case("inputs as a dict", tolerance=TIGHT)
def _() -> Training:
    x, y = data()
    a, b = layers.Input((2,), name="a"), layers.Input((3,), name="b")
    h = layers.Dense(6, "tanh")(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, layers.Dense(4)(h))
    return Training(model, {"a": x[:, :2], "b": x[:, 2:]}, y)


@case("shuffled by the seed", tolerance=TIGHT)
def _() -> Training:
    return Training(net(), *data(), fit={"shuffle": True})


# --- losses and metrics ---------------------------------------------------------------------------


@case("ignored targets", tolerance=TIGHT, needs=["divided by a mask"])
def _() -> Training:
    x, y = data()
    y[:4] = y[10] = y[17] = -1
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return Training(net(), x, y, loss=loss)


@case("sample weights", tolerance=TIGHT)
def _() -> Training:
    weights = np.linspace(0, 2, 19, dtype="float32")
    return Training(net(), *data(), fit={"sample_weight": weights})


@case("the mean by sample weights", tolerance=TIGHT, needs=["divided by a mask"])
def _() -> Training:
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    weights = np.linspace(0, 2, 19, dtype="float32")
    return Training(net(), *data(), loss=loss, fit={"sample_weight": weights})


@case("class weights", tolerance=TIGHT)
def _() -> Training:
    return Training(net(), *data(), fit={"class_weight": {0: 1.0, 1: 4.0, 2: 0.5, 3: 1.0}})


@case("label smoothing", tolerance=TIGHT)
def _() -> Training:
    x, y = data()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return Training(net(), x, np.eye(4, dtype="float32")[y], loss=loss)


@case("a summed loss", tolerance=TIGHT)
def _() -> Training:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return Training(net(), *data(), keras.optimizers.SGD(0.02), loss)


@case("masked steps of a sequence", tolerance=TIGHT, needs=["divided by a mask"])
def _() -> Training:
    dice = np.random.default_rng(3)
    x = dice.integers(1, 9, (19, 6))
    for i in range(19):
        x[i, 1 + i % 6 :] = 0
    model = keras.Sequential(
        [layers.Input((6,)), layers.Embedding(9, 5, mask_zero=True), layers.Dense(9)]
    )
    return Training(model, x, dice.integers(0, 9, (19, 6)))


@case("several outputs and losses", tolerance=TIGHT)
def _() -> Training:
    x, y = data()
    entry = layers.Input((5,))
    h = layers.Dense(6, "tanh")(entry)
    heads = {"a": layers.Dense(4, name="a")(h), "b": layers.Dense(1, name="b")(h)}
    loss = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"}
    targets = {"a": y, "b": y[:, None].astype("float32")}
    compile = {"loss_weights": {"a": 1.0, "b": 0.3}, "metrics": {"a": ["accuracy"], "b": ["mae"]}}
    return Training(keras.Model(entry, heads), x, targets, loss=loss, compile=compile)


@case("regularizers", tolerance=TIGHT)
def _() -> Training:
    return Training(net(layers.Dense(6, "tanh", kernel_regularizer="l2")), *data())


@case("a loss that a layer adds", tolerance=TIGHT, needs=["an activity regularizer"])
def _() -> Training:
    return Training(net(layers.Dense(6, "tanh", activity_regularizer="l2")), *data())


@case("metrics of all kinds", tolerance=(1e-5, 1e-5))
def _() -> Training:
    x, y = data()
    y = (y > 1).astype("float32")[:, None]
    model = keras.Sequential(
        [layers.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(1, "sigmoid")]
    )
    metrics = [
        "accuracy",
        keras.metrics.AUC(name="area"),
        keras.metrics.Recall(name="recall"),
        "mae",
        mean_gap,
    ]
    return Training(model, x, y, loss="binary_crossentropy", compile={"metrics": metrics})


def mean_gap(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y - y_pred), axis=-1)


@case("validation", tolerance=TIGHT)
def _() -> Training:
    return Training(net(), *data(), fit={"validation_data": data(11)})


# --- optimizers -----------------------------------------------------------------------------------


@case("Adam", tolerance=ADAPTIVE, linear=False)
def _() -> Training:
    return Training(net(), *data(), keras.optimizers.Adam(0.02))


@case("AdamW", tolerance=ADAPTIVE, linear=False)
def _() -> Training:
    return Training(net(), *data(), keras.optimizers.AdamW(0.02, weight_decay=0.1))


@case("Adagrad of an embedding", tolerance=ADAPTIVE, linear=False)
def _() -> Training:
    words = np.random.default_rng(3).integers(0, 11, (19, 2))
    model = keras.Sequential(
        [layers.Input((2,)), layers.Embedding(11, 6), layers.Flatten(), layers.Dense(4)]
    )
    return Training(model, words, data()[1], keras.optimizers.Adagrad(0.1))


@case("clip by norm", tolerance=TIGHT, linear=False)
def _() -> Training:
    return Training(net(), *data(), keras.optimizers.SGD(0.2, global_clipnorm=0.1))


@case("clip each by norm and by value", tolerance=TIGHT, linear=False)
def _() -> Training:
    return Training(net(), *data(), keras.optimizers.SGD(0.2, clipnorm=0.05))


@case("accumulation", tolerance=ADAPTIVE, linear=False, needs=["gradient_accumulation_steps"])
def _() -> Training:
    return Training(net(), *data(), keras.optimizers.Adam(0.02, gradient_accumulation_steps=2))


@case("a schedule", tolerance=TIGHT)
def _() -> Training:
    rate = keras.optimizers.schedules.CosineDecay(0.2, 6)
    return Training(net(), *data(), keras.optimizers.SGD(rate))


@case("averaged weights", tolerance=TIGHT, linear=False, needs=["use_ema"])
def _() -> Training:
    return Training(net(), *data(), keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5))


@case("mixed bfloat16", tolerance=(5e-3, 5e-3))
def _() -> Training:
    inner = layers.Dense(6, "tanh", dtype="mixed_bfloat16")
    return Training(net(inner), *data(), keras.optimizers.SGD(0.1), judged=False)


# --- models ---------------------------------------------------------------------------------------


@case("a frozen layer", tolerance=TIGHT)
def _() -> Training:
    model = net()
    model.layers[0].trainable = False
    return Training(model, *data())


@case("a layer used twice", tolerance=TIGHT)
def _() -> Training:
    entry, shared = layers.Input((5,)), layers.Dense(5, "tanh")
    return Training(keras.Model(entry, layers.Dense(4)(shared(shared(entry)))), *data())


@case("BatchNormalization", tolerance=ADAPTIVE, needs=["BatchNormalization"], without=UNSYNCED)
def _() -> Training:
    return Training(net(layers.Dense(6), layers.BatchNormalization()), *data(20))


@case("a recurrent layer", tolerance=TIGHT)
def _() -> Training:
    model = keras.Sequential([layers.Input((5, 1)), layers.GRU(4), layers.Dense(4)])
    x, y = data()
    return Training(model, x[..., None], y)


def dense() -> list[Any]:
    return [layers.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(4)]


@case("a train_step of its own", tolerance=TIGHT, needs=["a train_step of its own"])
def _() -> Training:
    return Training(OwnStep(dense()), *data())


class OwnStep(keras.Sequential):  # type: ignore[misc]
    def train_step(self, batch: Any) -> Any:
        x, y = batch
        output = self(x, training=True)
        loss = 1.5 * self.compute_loss(x, y, output)
        self.zero_grad()
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        self._loss_tracker.update_state(loss.detach())
        return {"loss": self._loss_tracker.result()}


@case(
    "a variable assigned in a step",
    tolerance=TIGHT,
    linear=False,
    needs=["a train_step of its own", "a variable assigned in a step"],
)
def _() -> Training:
    return Training(Running(dense()), *data())


class Running(OwnStep):
    """Keeps a running mean of its inputs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen = self.add_weight(shape=(5,), initializer="zeros", trainable=False, name="seen")

    def train_step(self, batch: Any) -> Any:
        self.seen.assign(0.9 * self.seen + 0.1 * ops.mean(ops.convert_to_tensor(batch[0]), axis=0))
        return super().train_step(batch)


@case(
    "a GAN",
    tolerance=ADAPTIVE,
    linear=False,
    needs=["a train_step of its own", "several optimizers"],
)
def _() -> Training:
    return Training(Gan(), data()[0], np.zeros(19), loss=None, judged=False)


class Gan(keras.Model):  # type: ignore[misc]
    """Two networks, an optimizer each; its noise comes with the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.made = keras.Sequential([layers.Input((2,)), layers.Dense(5)])
        self.judge = keras.Sequential(
            [layers.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(1)]
        )
        self.by_made, self.by_judge = keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.02)
        self.binary = keras.losses.BinaryCrossentropy(from_logits=True)
        self.seen = keras.metrics.Mean("judged")

    def call(self, x: Any) -> Any:
        return self.judge(x)

    def train_step(self, batch: Any) -> Any:
        x = ops.convert_to_tensor(batch[0])
        fake = self.made(x[:, :2])
        a, b = self.judge(x), self.judge(fake.detach())
        loss = self.binary(ops.ones_like(a), a) + self.binary(ops.zeros_like(b), b)
        self.apply(self.judge, self.by_judge, loss)
        c = self.judge(fake)
        self.apply(self.made, self.by_made, self.binary(ops.ones_like(c), c))
        self.seen.update_state(loss.detach(), sample_weight=None)
        return {"judged": self.seen.result()}

    def apply(self, part: Any, optimizer: Any, loss: Any) -> None:
        self.zero_grad()
        loss.backward()
        weights = part.trainable_weights
        with torch.no_grad():
            optimizer.apply([w.value.grad for w in weights], weights)


# --- callbacks ------------------------------------------------------------------------------------


@case("a callback that reads weights", tolerance=TIGHT)
def _() -> Training:
    read: list[float] = []

    def reads(model: Any, batch: int) -> None:
        read.append(sum(float(w.sum()) for w in model.get_weights()))

    return Training(
        net(), *data(), fit=after_batches(reads), after=lambda _: {"read": np.asarray(read)}
    )


@case("a callback that writes weights", tolerance=TIGHT)
def _() -> Training:
    def writes(model: Any, batch: int) -> None:
        if batch == 1:
            model.set_weights([w * 0.5 for w in model.get_weights()])

    return Training(net(), *data(), fit=after_batches(writes))


@case("a callback that sets the rate", tolerance=TIGHT)
def _() -> Training:
    def sets(model: Any, batch: int) -> None:
        model.optimizer.learning_rate = 0.1 / (1 + batch)

    return Training(net(), *data(), fit=after_batches(sets))


@case("a layer frozen in mid-training", tolerance=TIGHT, needs=["what is trainable changed"])
def _() -> Training:
    def freezes(model: Any, batch: int) -> None:
        model.layers[0].trainable = False

    return Training(net(), *data(), keras.optimizers.SGD(0.2), fit=after_batches(freezes))


def after_batches(then: Callable[[Any, int], None]) -> dict[str, Any]:
    class After(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            then(self.model, batch)

    return {"callbacks": [After()]}


@case("save, load and fit again", tolerance=ADAPTIVE, linear=False)
def _() -> Training:
    def again(model: Any) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            loaded = keras.models.load_model(f"{folder}/model.keras")
        history = loaded.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0).history
        found = {f"again {i}": v.numpy() for i, v in enumerate(loaded.weights)}
        return {"again": np.asarray(history["loss"]), **found}

    return Training(net(), *data(), keras.optimizers.Adam(0.02), after=again)


@case("train_on_batch", tolerance=TIGHT, linear=False)
def _() -> Training:
    def again(model: Any) -> Result:
        x, y = data()
        loss = model.train_on_batch(x[:8], y[:8])
        return {"one batch": loss, "tested": model.test_on_batch(x, y)}

    return Training(net(), *data(), after=again)
