"""Keras models under a PipelineStrategy: the weights, losses and metrics of one device."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

import stratagem as sg
from tests import spread
from tests.clock import in_time
from tests.spread import watched
from tests.support import cpus

pytestmark = pytest.mark.timeout(120)

Pipe = Callable[..., sg.PipelineStrategy]
SPARSE = keras.losses.SparseCategoricalCrossentropy


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipe]:
    """Pipelines by their settings; those that were made are used again."""
    made: dict[str, sg.PipelineStrategy] = {}

    def get(devices: int = 2, microbatches: Any = 3, **options: Any) -> sg.PipelineStrategy:
        key = f"{devices} {microbatches} {options}"
        if key not in made:
            made[key] = sg.PipelineStrategy(cpus(devices), microbatches, **options)
        return made[key]

    yield get
    for strategy in made.values():
        strategy.close()


def deep() -> Any:
    inner = [layers.Dense(8, activation="tanh") for _ in range(3)]
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3)])


def numbers(rows: int) -> tuple[Any, Any]:
    dice = np.random.default_rng(rows)
    return dice.normal(size=(rows, 6)).astype("float32"), dice.integers(0, 3, rows)


def trained(
    on: sg.Strategy | None,
    build: Callable[[], Any],
    x: Any,
    y: Any,
    *,
    batch: int = 16,
    epochs: int = 2,
    fit: dict[str, Any] | None = None,
    **compiled: Any,
) -> tuple[Any, Any]:
    """A model from one seed, and its history."""
    keras.utils.set_random_seed(7)
    options = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": SPARSE(from_logits=True),
        "metrics": ["accuracy"],
    } | {key: each() if callable(each) else each for key, each in compiled.items()}
    with on.scope() if on is not None else nullcontext():
        model = build()
        model.compile(**options)
    told = {"shuffle": False, "verbose": 0, **(fit or {})}
    history = model.fit(x, y, batch_size=batch, epochs=epochs, **told)
    return model, history.history


def same(on: sg.Strategy, build: Callable[[], Any], x: Any, y: Any, **more: Any) -> Any:
    """Train on one device and on stages, and compare; returns the model on stages."""
    one, history = trained(None, build, x, y, **more)
    model, found = trained(on, build, x, y, **more)
    assert history.keys() == found.keys()
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=key)
    assert apart(one, model) < 1e-6
    keras.utils.set_random_seed(7)
    fresh = build()
    if fresh.built:
        assert apart(fresh, model) > 1e-3
    return model


def apart(one: Any, other: Any) -> float:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Nadam])
def test_any_number_of_rows(pipe: Pipe, optimizer: Any) -> None:
    """Alone, and as a last batch behind a full one of 2M + 1."""
    for rows in (1, 3, 6) if optimizer is keras.optimizers.Adam else (5,):
        x, y = numbers(7 + rows)
        same(pipe(), deep, x, y, batch=7, epochs=1, optimizer=optimizer)
    for rows in (1, 2):
        x, y = numbers(rows)
        same(pipe(), deep, x, y, batch=rows, optimizer=optimizer)


def shuffled(on: sg.Strategy) -> None:
    """Two epochs, of which the second one's order follows from all that was drawn before."""
    x, y = numbers(45)
    same(on, deep, x, y, batch=11, fit={"shuffle": True})


def test_rows_are_shuffled_as_on_one_device(pipe: Pipe) -> None:
    shuffled(pipe(2, 3))


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe", "eager"])
def test_schedules(pipe: Pipe, schedule: str) -> None:
    x, y = numbers(53)
    same(pipe(2, 5, schedule=schedule), deep, x, y)


def test_a_stage_runs_its_own_layers_only(pipe: Pipe) -> None:
    """The first one also measures and checks, so the others are looked at."""

    def named() -> Any:
        inner = [layers.Dense(8, activation="tanh", name=name) for name in "abc"]
        return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3, name="d")])

    x, y = numbers(37)
    on = pipe(3, 4, split=["b", "c"])
    on.run(spread._begin)
    trained(on, named, x, y)
    assert on.run(_weights_seen)[1:] == [1, 2]
    on.run(spread._end)
    _, work = watched(lambda: trained(on, named, x, y), on)
    assert all(work.rows) and work.moved > 1e-3


def _weights_seen() -> int:
    assert spread._watch is not None
    return len(spread._watch.first)


def knotted() -> Any:
    """Skips over cuts, a layer that is called twice, a model inside, operations, two outputs."""
    x = keras.Input((6,), name="x")
    first = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
    again = layers.Dense(8, activation="tanh", bias_regularizer="l1", use_bias=True)
    inside = keras.Sequential([keras.Input((8,)), layers.Dense(8, "tanh"), layers.Dense(8)])
    body = again(inside(again(first)))
    joined = keras.ops.concatenate([body * 2.0 + first, x], axis=-1)
    named = layers.Dense(3, name="kind")(joined)
    return keras.Model(x, {"kind": named, "size": layers.Dense(1, name="size")(body)})


def test_skips_ties_regularisers_and_several_outputs(pipe: Pipe) -> None:
    x, y = numbers(37)
    targets = {"kind": y, "size": x[:, :1] * 2}
    compiled: Any = {
        "loss": {"kind": SPARSE(from_logits=True), "size": "mse"},
        "loss_weights": {"kind": 1.0, "size": 0.3},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        "optimizer": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.05),
    }
    for on in (pipe(3, 3), pipe(2, 4, split=["sequential"])):
        same(on, named_once(knotted), x, targets, **compiled)


def named_once(build: Callable[[], Any]) -> Callable[[], Any]:
    """Names of layers that do not count on from model to model."""

    def made() -> Any:
        keras.utils.clear_session()
        return build()

    return made


def test_clipping_schedules_and_weight_decay(pipe: Pipe) -> None:
    x, y = numbers(41)
    rate = keras.optimizers.schedules.ExponentialDecay
    for make in (
        lambda: keras.optimizers.SGD(rate(0.1, 2, 0.5), momentum=0.9, global_clipnorm=0.1),
        lambda: keras.optimizers.Adam(0.01, clipnorm=0.05, weight_decay=0.01),
        lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01),
    ):
        same(pipe(), deep, x, y, optimizer=make)


def test_sample_weights_class_weights_and_sums(pipe: Pipe) -> None:
    x, y = numbers(37)
    weight = np.random.default_rng(1).uniform(size=37)
    same(pipe(), deep, x, y, fit={"sample_weight": weight}, weighted_metrics=["accuracy"])
    same(pipe(), deep, x, y, fit={"class_weight": {0: 1.0, 1: 3.0, 2: 0.2}})
    summed = SPARSE(from_logits=True, reduction="sum")
    same(pipe(), deep, x, y, loss=lambda: summed, optimizer=keras.optimizers.SGD)


def test_mixed_precision(pipe: Pipe) -> None:
    """With one microbatch to rounding in single precision."""

    def half() -> Any:
        mixed = keras.DTypePolicy("mixed_bfloat16")
        body = [layers.Dense(8, activation="tanh", dtype=mixed) for _ in range(3)]
        return keras.Sequential([keras.Input((6,)), *body, layers.Dense(3)])

    x, y = numbers(37)
    model = same(pipe(2, 1), half, x, y)
    assert apart(model, trained(None, deep, x, y)[0]) > 1e-4


def reader() -> Any:
    """A mask that crosses the cut."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(9, 6, mask_zero=True),
            layers.Dense(6),
            layers.LSTM(6, name="lstm"),
            layers.Dense(3),
        ]
    )


def test_masks_go_from_stage_to_stage(pipe: Pipe) -> None:
    words = np.random.default_rng(3).integers(0, 9, (29, 5))
    words[:, 3:] *= words[:, 3:] > 4
    same(pipe(3, 3), reader, words, numbers(29)[1])


def test_a_loss_that_a_mask_divides(pipe: Pipe) -> None:
    def tagger() -> Any:
        body = [layers.Embedding(9, 6, mask_zero=True), layers.Dense(6), layers.Dense(3)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *body])

    words = np.random.default_rng(3).integers(0, 5, (23, 5))
    tags = words % 3
    same(pipe(2, 1), tagger, words, tags)
    with pytest.raises(sg.NotDistributable, match="divided by a mask"):
        trained(pipe(2, 2), tagger, words, tags)


def test_a_loss_that_ignores_a_class(pipe: Pipe) -> None:
    """It is divided by the rows of other classes, which Keras marks by a mask."""
    x, y = numbers(23)
    ignoring = lambda: SPARSE(from_logits=True, ignore_class=1)  # noqa: E731
    same(pipe(2, 1), deep, x, y, loss=ignoring)
    with pytest.raises(sg.NotDistributable, match="divided by a mask"):
        trained(pipe(2, 2), deep, x, y, loss=ignoring)


@pytest.mark.slow
def test_batch_normalization_by_microbatch() -> None:
    """On a pipeline and on a mesh, of whose rows the running statistics are averaged."""
    (x, y), sgd = numbers(16), keras.optimizers.SGD

    def normed() -> Any:
        body = [layers.Dense(8), layers.BatchNormalization(momentum=0.5), layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *body])

    fresh = normed()
    parts = [
        trained(None, normed, x[i : i + 4], y[i : i + 4], batch=4, epochs=1, optimizer=sgd)[0]
        for i in range(0, 16, 4)
    ]
    patient = sg.Patience(answer=30.0)
    for rows, on in (
        (1, sg.PipelineStrategy(cpus(2), 4, batch_norm="microbatch")),
        (2, sg.Mesh(2, 2, microbatches=2, batch_norm="microbatch", patience=patient)),
    ):
        with on:
            model, _ = trained(on, normed, x, y, epochs=1, optimizer=sgd)
        for place, variable in enumerate(model.weights):
            each = [part.weights[place].numpy() for part in parts]
            expected = sum(each) / 4
            if not variable.trainable:  # from the statistics of four pieces, one after another
                start = fresh.weights[place].numpy()
                by_row = np.stack([2 * value - start for value in each]).reshape(rows, -1, 8)
                expected = np.stack([start] * rows)
                for piece in by_row.swapaxes(0, 1):
                    expected = (expected + piece) / 2
                expected = expected.mean(0)
            np.testing.assert_allclose(variable.numpy(), expected, atol=1e-6)
        assert apart(model, parts[0]) > 1e-3


def test_batch_normalization_with_one_microbatch(pipe: Pipe) -> None:
    def normed() -> Any:
        inner = [layers.Dense(8), layers.BatchNormalization(), layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *inner])

    x, y = numbers(37)
    same(pipe(2, 1), normed, x, y)
    with pytest.raises(sg.NotDistributable, match="looks at all rows"):
        trained(pipe(2, 2), normed, x, y)

    def frozen() -> Any:
        model = normed()
        model.layers[1].trainable = False
        return model

    same(pipe(2, 2), frozen, x, y)


class Centred(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0)


def test_rows_that_look_at_each_other_with_one_microbatch(pipe: Pipe) -> None:
    """Trained as on one device; what shares rows out is refused."""
    x, y = numbers(37)
    model = same(pipe(2, 1), stacked(Centred()), x, y)
    for call in (
        lambda: model.predict(x, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.fit(x, y, verbose=0, validation_data=(x, y)),
    ):
        with pytest.raises(sg.NotDistributable, match="other rows"):
            call()


def test_dropout_draws_by_microbatch_and_layer(pipe: Pipe) -> None:
    """Repeatable, and the same for every split and schedule; another draw each step."""

    def dropping() -> Any:
        names = ["a", "b", "c", "d"]
        inner = [layers.Dense(8, "tanh", name=names[0]), layers.Dropout(0.5, name=names[1])]
        last = [layers.Dense(8, "tanh", name=names[2]), layers.Dense(3, name=names[3])]
        return keras.Sequential([keras.Input((6,)), *inner, *last])

    def kept() -> Any:
        model = dropping()
        model.layers[1].rate = 0.0
        return model

    x, y = numbers(33)
    ways = [{"split": ["b"]}, {"split": ["b"]}, {"split": ["c"]}, {"split": ["d"]}]
    models = [trained(pipe(2, 3, **way), dropping, x, y)[0] for way in ways]
    more = trained(pipe(2, 3, split=["c"], schedule="gpipe"), dropping, x, y)[0]
    assert [apart(models[0], each) for each in [*models[1:], more]] == [0.0] * 4
    assert apart(models[0], trained(None, dropping, x, y)[0]) > 1e-3
    assert apart(models[0], trained(pipe(2, 3, split=["c"]), kept, x, y)[0]) > 1e-3


def test_dropout_is_as_strong_as_on_one_device(pipe: Pipe) -> None:
    """A rate of nearly one leaves nothing but the last bias to be trained."""

    def silent() -> Any:
        body = [layers.Dense(8), layers.Dropout(1 - 1e-7), Inside(), layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *body])

    x, y = numbers(33)
    same(pipe(2, 3), silent, x, y)


class Inside(layers.Layer):
    """Has a dropout, and no argument that says whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(1 - 1e-7)

    def call(self, x: Any) -> Any:
        return self.dropout(x + 1.0)


def test_a_model_that_is_built_by_its_first_batch(pipe: Pipe) -> None:
    x, y = numbers(37)
    same(pipe(), lambda: keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(3)]), x, y)


def test_other_calls_and_files(pipe: Pipe, tmp_path: Path) -> None:
    """Evaluation, prediction, single batches, two calls of fit, one plain file."""
    x, y = numbers(37)
    one, _ = trained(None, deep, x, y, optimizer=keras.optimizers.Adam)
    model, _ = trained(pipe(), deep, x, y, optimizer=keras.optimizers.Adam)
    for each in (one, model):
        each.train_on_batch(x[:5], y[:5])
        each.train_on_batch(x[5:9], y[5:9])
        each.fit(x, y, batch_size=9, verbose=0, shuffle=False, validation_data=(x[:9], y[:9]))
    assert apart(one, model) < 1e-6
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), one.evaluate(x, y, verbose=0), 1e-5)
    found, expected = model.predict(x, verbose=0), one.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    model.save(tmp_path / "m.keras")
    for on in (None, pipe(3, 2)):
        with on.scope() if on is not None else nullcontext():
            loaded = keras.models.load_model(tmp_path / "m.keras")
        assert apart(loaded, one) < 1e-6
        if on is not None:
            loaded.compile(optimizer=loaded.optimizer, loss=loaded.loss)
        loaded.fit(x, y, batch_size=9, verbose=0, shuffle=False)
        one.save(tmp_path / "one.keras")
        other = keras.models.load_model(tmp_path / "one.keras")
        other.fit(x, y, batch_size=9, verbose=0, shuffle=False)
        assert apart(loaded, other) < 1e-6  # with the state of every stage's optimizer


def test_callbacks(pipe: Pipe) -> None:
    """They see all weights, change the rate, and put weights back."""
    x, y = numbers(37)

    def calls() -> dict[str, Any]:
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (epoch + 1))
        return {"callbacks": [stop, rate], "validation_data": (x[:9], y[:9])}

    one, history = trained(None, deep, x, y, epochs=6, fit=calls())
    model, found = trained(pipe(), deep, x, y, epochs=6, fit=calls())
    assert apart(one, model) < 1e-6 and len(found["loss"]) == len(history["loss"])


def test_layers_that_are_frozen_between_calls(pipe: Pipe) -> None:
    x, y = numbers(37)
    results = []
    for on in (None, pipe()):
        model, _ = trained(on, deep, x, y)
        model.layers[0].trainable = False
        with on.scope() if on is not None else nullcontext():
            model.compile(optimizer=keras.optimizers.Adam(0.01), loss=SPARSE(from_logits=True))
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        results.append(model)
    assert apart(*results) < 1e-6


class Sub(keras.Model):
    def call(self, x: Any) -> Any:
        return x


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Spectral(layers.Layer):
    """Writes a state at every call."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x


class Adding(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x))
        return x


def stacked(*inner: Any) -> Callable[[], Any]:
    return lambda: keras.Sequential(
        [keras.Input((6,)), layers.Dense(6), *inner, layers.Dense(6), layers.Dense(3)]
    )


def own_step() -> Any:
    x = keras.Input((6,))
    return OwnStep(x, layers.Dense(3)(layers.Dense(6)(x)))


def test_refusals(pipe: Pipe) -> None:
    x, y = numbers(17)
    optimizers = keras.optimizers
    cases: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
        ("has a call of its own", Sub, {}),
        ("train_step, compute_loss", own_step, {}),
        ("activity_regularizer", stacked(layers.Dense(6, activity_regularizer="l2")), {}),
        ("use_ema", deep, {"optimizer": lambda: optimizers.SGD(use_ema=True)}),
        ("gradient_accumulation", deep, {"optimizer": lambda: accumulating()}),
        ("LossScaleOptimizer", deep, {"optimizer": lambda: scaled()}),
        ("writes to .*spectral", stacked(Spectral(name="spectral")), {}),
        ("adds a loss of its own", stacked(Adding()), {}),
        ("give the loss to compile", stacked(Adding()), {"loss": None}),
    ]
    for words, build, compiled in cases:
        with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match=words):
            trained(pipe(), build, x, y, **compiled)
    with pytest.raises(sg.UsageError, match="4 layers that can be cut apart"):
        trained(pipe(5, 2), deep, x, y)
    with pytest.raises(sg.UsageError, match="'nowhere', and the model has no layer"):
        trained(pipe(2, 2, split=["nowhere"]), deep, x, y)
    for words, option in (
        ("columns cut torch's", {"columns": 2}),
        ("largest of 2 stages", {"memory": 1e3}),
        ("Keras models run on CPUs so far, and the devices here are cuda:0, cpu:0", {}),
    ):
        on = sg.PipelineStrategy(cpus(2), **option)  # type: ignore[arg-type]
        group: Any = on.replica_group
        with on.scope():
            model = deep()
            model.compile(loss="mse")
        group.devices = group.devices if option else ("cuda:0", "cpu:0")
        with pytest.raises(sg.NotDistributable, match=words):
            model.fit(x, y, verbose=0)
        assert group.replica is None


def test_keras_models_in_the_place_of_modules(pipe: Pipe) -> None:
    """The copies of their layers in other processes have other variables."""
    x, y = torch.randn(8, 6), torch.zeros(8).long()

    def loop() -> None:
        model = named_once(deep)()
        pipe().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(sg.NotDistributable, match="'Sequential' is a layer of Keras, and a loop"):
        pipe().run(loop)
    sharing = torch.nn.Sequential(torch.nn.Linear(6, 6), deep())
    for on in (sg.PipelineStrategy(cpus(2)), sg.MirroredStrategy(cpus(2))):
        model = sg.Model(sharing, on)
        model.compile(optimizer="sgd", loss="cross_entropy", check=False)
        with pytest.raises(sg.NotDistributable, match="'1' is a layer of Keras, whose copies"):
            model.fit(x, y, verbose=0)
        assert on.replica_group.replica is None  # type: ignore[attr-defined]


class Failing(layers.Layer):
    """Acts in a process other than the first, in the third batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(name="failing")
        self.kind, self.calls, self.home = kind, 0, os.getpid()

    def call(self, x: Any) -> Any:
        self.calls += 1
        if self.calls > 6 and os.getpid() != self.home:
            if self.kind == "raise":
                raise ValueError("the seventh microbatch is one too many")
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_stage_that_fails_is_named(pipe: Pipe) -> None:
    """With its traceback, or the signal; the strategy can be used again."""
    on = pipe(2, 3, split=["failing"])
    trained(on, stacked(Failing("")), *numbers(9), epochs=1)  # starts the processes
    for kind, error, words in (
        ("raise", sg.ReplicaFailed, r"(?s)replica 1 .*in call\n.*one too many"),
        ("kill", sg.ReplicaLost, "replica 1 .* was killed by SIGKILL"),
    ):
        began = time.monotonic()
        with pytest.raises(error, match=words):
            trained(on, stacked(Failing(kind)), *numbers(64))
        in_time(time.monotonic() - began, 5.0)
    same(on, stacked(Failing("")), *numbers(64))


class Late(layers.Layer):
    """Adds a loss, or counts, once it is turned on."""

    on = False

    def __init__(self, inner: Any) -> None:
        super().__init__(name="late")
        self.inner = inner

    def call(self, x: Any) -> Any:
        return self.inner(x) if self.on else x


class TurnOn(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.get_layer("late").on = epoch > 0


def counting() -> Any:
    inner = Spectral(name="spectral")
    inner.build((None, 6))
    return stacked(Late(inner))()


@pytest.mark.filterwarnings("ignore:.*does not have a `build")
@pytest.mark.parametrize(
    ("words", "build"),
    [
        ("adds a loss of its own", lambda: stacked(Late(Adding()))()),
        ("writes to .*spectral", counting),
    ],
)
def test_effects_that_begin_later_are_refused(pipe: Pipe, words: str, build: Any) -> None:
    with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match=words):
        trained(pipe(), build, *numbers(17), fit={"callbacks": [TurnOn()]})


class Measured(layers.Layer):
    """Has a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.size.update_state(keras.ops.mean(x))
        return x


def test_a_metric_of_a_layer(pipe: Pipe) -> None:
    """With one microbatch it counts as on one device; measuring layers leaves no trace in it."""
    x, y = numbers(37)
    same(pipe(2, 1), lambda: stacked(Measured())(), x, y)
    with pytest.raises(sg.NotDistributable, match="has a metric of its own"):
        trained(pipe(), lambda: stacked(Measured())(), x, y)


def accumulating() -> Any:
    return keras.optimizers.SGD(gradient_accumulation_steps=2)


def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
