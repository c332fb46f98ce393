"""Keras' calls with parameter servers: callbacks, changes between steps, saving, single batches."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import stratagem as sg
from stratagem.state import keras_recipe
from tests.clock import unless_late
from tests.frontends.keras.served_support import close_served, served
from tests.keras_both import alike
from tests.keras_support import BOOKS, apart, digits, history_apart, strategy, train
from tests.spread import assert_work, watched

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SYNC = sg.Synchronous()


@pytest.fixture(scope="module", autouse=True)
def clusters_end_with_the_file() -> Iterator[None]:
    yield
    close_served()


def mlp() -> Any:
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(6, activation="tanh"), layers.Dense(3)]
    )


def momentum(**more: Any) -> Any:
    return {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9, **more),
        "loss": LOGITS,
        "metrics": ["accuracy"],
    }


def both(
    compile: Any = momentum, fit: Any = None, where: sg.Strategy | None = None, build: Any = mlp
) -> tuple[Any, Any]:
    """A model trained plainly and one trained with servers; `fit` makes the arguments anew."""
    x, y = digits(43)
    given = lambda: {"x": x, "y": y, "batch_size": 8, "epochs": 3, **(fit() if fit else {})}  # noqa: E731
    where = where or served(SYNC, 2, 1)
    (alone, expected), here = watched(lambda: train(build, compile, given()))
    (spread, history), there = watched(lambda: train(build, compile, given(), where), where)
    assert_work(here, there)
    assert apart(alone, spread) < 2e-6
    assert history_apart(expected, history) < 1e-5
    assert int(alone.optimizer.iterations.numpy()) == int(spread.optimizer.iterations.numpy())
    return alone, spread


# --- what changes during a training ---------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_schedule_runs_on_the_servers() -> None:
    schedule = lambda: keras.optimizers.schedules.CosineDecay(0.3, 15)  # noqa: E731
    both(
        lambda: {"optimizer": keras.optimizers.SGD(schedule()), "loss": LOGITS},
        where=served(SYNC, 2, 2),
    )


@pytest.mark.timeout(120)
def test_callbacks_change_the_learning_rate() -> None:
    alone, spread = both(
        fit=lambda: {
            "validation_split": 0.2,
            "callbacks": [
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
                keras.callbacks.ReduceLROnPlateau(
                    monitor="loss", factor=0.1, patience=0, min_delta=10
                ),
            ],
        }
    )
    assert float(spread.optimizer.learning_rate) == float(alone.optimizer.learning_rate) < 0.01


class Falling(keras.callbacks.Callback):
    """Looks at nothing: no reason for the steps to wait for each other but the rate itself."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.2 * 0.8**batch


@pytest.mark.timeout(120)
def test_a_learning_rate_for_each_batch() -> None:
    both(fit=lambda: {"callbacks": [Falling()]})


class Watching(keras.callbacks.Callback):
    """Reads the logs of every step, and changes the model between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []
        self.epochs: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append({k: float(v) for k, v in logs.items()})
        if batch == 2:
            self.model.optimizer.learning_rate = 0.05
            self.model.layers[0].bias.assign(self.model.layers[0].bias * 0.5)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)


@pytest.mark.timeout(120)
def test_synchronous_callbacks_see_exact_steps_and_change_weights_between_them() -> None:
    watchers = []

    def fit() -> dict[str, Any]:
        watchers.append(Watching())
        return {"callbacks": [watchers[-1]]}

    both(fit=fit, where=served(SYNC, 2, 2))
    ours, theirs = watchers
    assert ours.epochs == theirs.epochs == [0, 1, 2]
    assert len(ours.seen) == len(theirs.seen) == 18
    for a, b in zip(ours.seen, theirs.seen, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.timeout(120)
def test_early_stopping_restores_the_best_weights() -> None:
    both(
        fit=lambda: {
            "epochs": 6,
            "callbacks": [
                keras.callbacks.EarlyStopping(
                    monitor="loss", mode="max", patience=1, restore_best_weights=True
                )
            ],
        }
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("updates", [SYNC, sg.Asynchronous()], ids=["synchronous", "asynchronous"])
def test_stopped_in_mid_epoch(updates: Any) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 2

    x, y = digits(83)
    with served(updates, 2, 1).scope():
        model = mlp()
        model.compile(**momentum())
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[Stop()])
    assert len(history.epoch) == 1
    assert int(model.optimizer.iterations.numpy()) == 3
    assert np.isfinite(history.history["loss"][0])


class Scaled(keras.layers.Layer):
    """Depends on an attribute and on a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.offset = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        return x * self.factor + self.offset


class Annealing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[0].factor = 1.0 + epoch
        self.model.layers[0].offset.assign(0.1 * epoch)


@pytest.mark.timeout(120)
def test_workers_follow_attributes_and_untrained_weights() -> None:
    build = lambda: keras.Sequential([keras.Input((8,)), Scaled(), layers.Dense(3)])  # noqa: E731
    both(fit=lambda: {"callbacks": [Annealing()]}, build=build)


class Counting(keras.Model):
    """Both weights go down by one with every update, whoever makes it and on whatever rows."""

    def __init__(self) -> None:
        super().__init__()
        self.line = layers.Dense(1, kernel_initializer="zeros")

    def call(self, x: Any) -> Any:
        return self.line(x)


def counting(callback: Any, epochs: int = 2) -> Any:
    """40 updates an epoch by two workers that never wait; returns kernel and bias."""
    with served(sg.Asynchronous(), 2, 1).scope():
        model = Counting()
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss=lambda y, p: p)
    ones = np.ones((160, 1), "float32")
    model.fit(ones, ones, batch_size=4, epochs=epochs, verbose=0, callbacks=[callback])
    return [float(w.ravel()[0]) for w in model.get_weights()]


@pytest.mark.timeout(120)
def test_asynchronous_updates_of_other_weights_survive_what_a_callback_writes() -> None:
    class Writing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.line.bias.assign([5.0])

    assert counting(Writing()) == [-80.0, 5.0]


@pytest.mark.timeout(120)
def test_asynchronous_updates_that_were_under_way_come_before_what_a_callback_writes() -> None:
    class Setting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 20:
                self.model.set_weights([np.full((1, 1), 100.0), np.full(1, 200.0)])

    assert counting(Setting()) == [100.0 - 19, 200.0 - 19]  # of the last epoch: 40 less 21


@pytest.mark.timeout(120)
def test_asynchronous_callbacks_read_and_write_at_the_end_of_an_epoch() -> None:
    read: list[float] = []

    class Setting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 30:
                read.append(float(self.model.get_weights()[0][0, 0]))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            read.append(float(self.model.line.kernel.numpy()[0, 0]))
            self.model.set_weights([w * 0 for w in self.model.get_weights()])

    assert counting(Setting()) == [0.0, 0.0]
    assert read == [-31.0, -40.0] * 2


@pytest.mark.timeout(120)
def test_what_callbacks_change_does_not_pile_up() -> None:
    """Tickets have the newest value of each attribute only."""
    seen: list[int] = []

    class Annealing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.layers[0].beta = float(batch)
            self.model.layers[0].other = float(-batch)
            seen.append(len(self.model.__dict__["_stratagem"].side.training._news["attributes"]))

    model = train(
        mlp,
        momentum,
        {"x": digits(43)[0], "y": digits(43)[1], "batch_size": 4, "callbacks": [Annealing()]},
        served(SYNC, 2, 1),
    )[0]
    assert model.layers[0].beta == 10.0 and max(seen) == 2


class Own(keras.Model):
    """A custom step with logs that are no metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        self.mean.update_state(loss)
        return {"mean": self.mean.result(), "largest": x.abs().mean()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("updates", [SYNC, sg.Asynchronous()], ids=["synchronous", "asynchronous"])
def test_a_training_step_of_ones_own(updates: Any) -> None:
    if isinstance(updates, sg.Synchronous):
        both(build=Own, where=served(updates, 2, 2))
        return
    x, y = digits(43)
    _, history = train(
        Own, momentum, {"x": x, "y": y, "batch_size": 8, "epochs": 3}, served(updates, 2, 1)
    )
    assert set(history) - BOOKS == {"mean", "largest"} and len(history["mean"]) == 3
    assert all(0 < value < 5 for value in history["mean"])


def on_a_base() -> Any:
    """A frozen base that was compiled and trained before."""
    base = keras.Sequential([keras.Input((8,)), layers.Dense(6, activation="tanh")])
    base.compile("adam", "mse")
    base.fit(np.ones((4, 8)), np.ones((4, 6)), verbose=0)
    base.trainable = False
    return keras.Sequential([base, layers.Dense(3)])


def own_on_a_base(kind: Any = None, trainable: bool = False) -> Any:
    model = (kind or Own)()
    model.dense = on_a_base()
    model.dense.layers[0].trainable = trainable
    return model


def own_on_a_fresh_base() -> Any:
    """The frozen base was never compiled: it has no optimizer at all."""
    model = Own()
    base = keras.Sequential([keras.Input((8,)), layers.Dense(6, activation="tanh")])
    base.trainable = False
    model.dense = keras.Sequential([base, layers.Dense(3)])
    return model


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "build",
    [on_a_base, own_on_a_base, lambda: own_on_a_base(trainable=True), own_on_a_fresh_base],
    ids=["keras", "own step", "own step, trained", "own step, never compiled"],
)
def test_a_part_that_was_compiled_before(build: Any) -> None:
    """Its optimizer never steps."""
    both(build=build)


class InTurn(Own):
    """Steps the optimizer of a part."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        weights = self.dense.layers[0].trainable_weights
        self.dense.layers[0].optimizer.apply([v.value.grad for v in weights], weights)
        return logs


def test_the_optimizer_of_a_part_that_steps() -> None:
    x, y = digits(16)
    build = lambda: own_on_a_base(InTurn, trainable=True)  # noqa: E731
    with pytest.raises(sg.NotDistributable, match="MirroredStrategy where models train in turn"):
        train(build, momentum, {"x": x, "y": y}, served(SYNC, 2, 1))


class Averaging(Own):
    """A custom step that reads the optimizer, and after `apply` the new weights."""

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        kernel = tuple(self.dense.kernel.shape)
        self.average = self.add_weight(shape=kernel, initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        rate = self.optimizer.learning_rate
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        scale = keras.ops.cast(self.optimizer.iterations + 1, "float32") * rate
        (loss / scale + ((self.dense.kernel - self.average) ** 2).sum()).backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
            self.average.assign(0.5 * self.average + 0.5 * self.dense.kernel)
        self.mean.update_state(loss)
        count = keras.ops.cast(self.optimizer.iterations, "float32")
        return {"mean": self.mean.result(), "norm": (self.dense.kernel**2).sum(), "count": count}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("updates", "workers"), [(SYNC, 1), (SYNC, 2), (SYNC, 3), (sg.Asynchronous(), 1)]
)
def test_a_training_step_reads_what_apply_made(updates: Any, workers: int) -> None:
    """Also on a worker that has no row of the last batch."""
    x, y = digits(17)

    def falling() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.8)
        return {**momentum(), "optimizer": keras.optimizers.SGD(rate, momentum=0.5)}

    both(falling, lambda: {"x": x, "y": y}, served(updates, workers, 1), Averaging)


class Peeking(Own):
    """A custom step that reads a momentum."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {**logs, "momentum": float(ops.sum(self.optimizer.variables[2]))}


@pytest.mark.parametrize("workers", [1, 2])
def test_momenta_are_not_read_in_a_step(workers: int) -> None:
    x, y = digits(16)
    with pytest.raises(sg.errors.StratagemError, match=r"momenta or the like .* on the servers"):
        train(Peeking, momentum, {"x": x, "y": y}, served(SYNC, workers, 1))


def test_asynchronous_servers_say_what_apply_leaves_old(caplog: Any) -> None:
    x, y = digits(16)
    train(Own, momentum, {"x": x, "y": y, "batch_size": 8}, served(sg.Asynchronous(), 2, 1))
    assert caplog.text.count("is from before") == 1


@pytest.mark.timeout(120)
def test_generators_and_class_weights() -> None:
    def batches() -> Any:
        dice = np.random.default_rng(3)
        while True:
            yield dice.normal(size=(7, 8)).astype("float32"), dice.integers(0, 3, 7)

    both(fit=lambda: {"x": batches(), "y": None, "batch_size": None, "steps_per_epoch": 4})
    both(fit=lambda: {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}})


@pytest.mark.timeout(120)
def test_exponential_averages_and_accumulation() -> None:
    both(lambda: momentum(use_ema=True, ema_momentum=0.8), where=served(SYNC, 2, 2))
    both(lambda: momentum(gradient_accumulation_steps=2), where=served(SYNC, 2, 2))


@pytest.mark.timeout(120)
def test_weight_decay_and_constraints() -> None:
    def build() -> Any:
        return keras.Sequential([keras.Input((8,)), layers.Dense(3, kernel_constraint="max_norm")])

    def compile() -> Any:
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.5, epsilon=1e-2)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return {"optimizer": optimizer, "loss": LOGITS}

    both(compile, build=build, where=served(SYNC, 2, 2))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("on_epoch", [False, True])
def test_averages_swapped_in_for_a_while(on_epoch: bool) -> None:
    swap = lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)  # noqa: E731
    both(
        lambda: momentum(use_ema=True, ema_momentum=0.8),
        where=served(SYNC, 2, 2),
        fit=lambda: {"callbacks": [swap()], "validation_split": 0.2},
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("updates", [SYNC, sg.Asynchronous()], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_sixteen_bits_on_the_wire(wire: str, updates: Any, monkeypatch: Any) -> None:
    """Over sockets: on one machine nothing would travel. What is validated is what is saved."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    x, y = digits(43)
    fit = {"x": x, "y": y, "batch_size": 8, "epochs": 3, "validation_data": (x[:9], y[:9])}
    alone, expected = train(mlp, momentum, fit)
    where = sg.ParameterServerStrategy(
        sg.LocalCluster(workers=2 if updates is SYNC else 1, ps=2), updates=updates, wire=wire
    )
    try:
        spread, history = train(mlp, momentum, fit, where)
    finally:
        where.close()
    assert 1e-5 < apart(alone, spread) < 2e-2  # rounded, and only rounded
    assert history_apart(expected, history) < (0.2 if wire == "bfloat16" else 0.02)
    assert spread.evaluate(x[:9], y[:9], verbose=0)[0] == pytest.approx(history["val_loss"][-1])


# --- statistics and metrics -----------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_moving_statistics_are_the_mean_over_the_workers() -> None:
    with served(SYNC, 2, 1).scope():
        norm = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((1,)), norm, layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    x = np.array([[0], [2], [10], [14]], "float32")
    workers: set[float] = set()
    for _ in range(20):  # one worker may do both halves; that is another, defined answer
        norm.moving_mean.assign([0.0])
        model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
        workers.add(round(float(norm.moving_mean.numpy()[0]), 4))
        if 3.25 in workers:
            break
    assert workers <= {3.25, 6.25, 3.5}
    unless_late(3.25 in workers, "one worker did both halves every time")


@pytest.mark.timeout(120)
def test_what_is_dropped_is_not_counted() -> None:
    """A metric that counts rows: each epoch has every row once, however often it was tried."""

    class Rows(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="rows")
            self.count = self.add_variable(shape=(), initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.count.assign_add(float(len(y_true)))
            time.sleep(0.005)  # every worker's gradient grows old before it is handed in

        def result(self) -> Any:
            return self.count.value

    x, y = digits(120)
    where = served(sg.Asynchronous(staleness=[sg.Drop(older_than=0)]), 3, 1)
    with where.scope():
        model = mlp()
        model.compile(optimizer="sgd", loss=LOGITS, metrics=[Rows()])
    history = model.fit(x, y, batch_size=4, epochs=3, verbose=0).history
    assert history["rows"] == [120.0, 120.0, 120.0]
    stats = where.stats()
    assert stats.applied == 90
    unless_late(stats.dropped, "nobody's gradient was old, by chance")
    assert stats.received == stats.applied + stats.dropped
    where.close()


# --- single batches, saving -----------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_single_batches_are_exact() -> None:
    x, y = digits(33)
    keras.utils.set_random_seed(7)
    alone = mlp()
    alone.compile(**momentum())
    keras.utils.set_random_seed(7)
    with served(SYNC, 2, 1).scope():
        spread = mlp()
        spread.compile(**momentum())
    for i in range(3):
        batch = slice(11 * i, 11 * i + 11)
        expected = alone.train_on_batch(x[batch], y[batch])
        assert spread.train_on_batch(x[batch], y[batch]) == pytest.approx(expected, abs=1e-5)
    assert spread.test_on_batch(x, y) == pytest.approx(alone.test_on_batch(x, y), abs=1e-5)
    assert np.abs(spread.predict_on_batch(x) - alone.predict_on_batch(x)).max() < 1e-5
    assert apart(alone, spread) < 2e-6


@pytest.mark.timeout(120)
def test_saved_in_mid_training_and_resumed_anywhere(tmp_path: Path) -> None:
    x, y = digits(43)
    fit = {"x": x, "y": y, "batch_size": 8, "shuffle": False}
    alone, _ = train(mlp, momentum, {**fit, "epochs": 4})
    path = str(tmp_path / "{epoch}.keras")
    train(
        mlp,
        momentum,
        {**fit, "epochs": 2, "callbacks": [keras.callbacks.ModelCheckpoint(path)]},
        served(SYNC, 2, 2),
    )
    places: list[Any] = [None, strategy(2), served(SYNC, 2, 1)]
    for where in places:
        if where is None:
            model = keras.models.load_model(path.format(epoch=2))
        else:
            with where.scope():
                model = keras.models.load_model(path.format(epoch=2))
        assert int(model.optimizer.iterations.numpy()) == 12
        model.fit(**fit, epochs=2, verbose=0)
        assert apart(alone, model) < 2e-6
    strategy(2).close()
    early = keras.models.load_model(path.format(epoch=1))
    assert int(early.optimizer.iterations.numpy()) == 6


@pytest.mark.timeout(120)
def test_a_second_training_goes_on_from_the_first() -> None:
    x, y = digits(43)
    alone, _ = train(mlp, momentum, {"x": x, "y": y, "batch_size": 8, "epochs": 2})
    spread, _ = train(
        mlp, momentum, {"x": x, "y": y, "batch_size": 8, "epochs": 2}, served(SYNC, 2, 2)
    )
    for model in (alone, spread):
        keras.utils.set_random_seed(1)
        model.fit(x, y, batch_size=8, verbose=0)
    assert apart(alone, spread) < 2e-6
    assert spread.fit(x, y, epochs=0, verbose=0).history == {}
    assert apart(alone, spread) < 2e-6
    with torch.no_grad():  # the model is the user's own again
        spread.optimizer.apply(
            [v.value * 0 for v in spread.trainable_variables], spread.trainable_variables
        )


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_server_that_lags_behind_does_not_give_old_values_at_the_end_of_an_epoch() -> None:
    """The second server sleeps most of the time; what is validated are the last values."""
    where = served(SYNC, 2, 2)
    both(where=where)
    pid, done = where.replica_group.server_pids[1], threading.Event()  # type: ignore[attr-defined]

    def doze() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.004)

    sleeper = threading.Thread(target=doze)
    sleeper.start()
    try:
        for _ in range(4):
            both(where=where, fit=lambda: {"validation_split": 0.2})
    finally:
        done.set()
        sleeper.join()


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_worker_that_is_killed_is_replaced() -> None:
    x, y = digits(400)
    where = served(sg.Asynchronous(), 2, 1)
    with where.scope():
        model = mlp()
        model.compile(optimizer=keras.optimizers.SGD(0.01), loss=LOGITS)
    model.fit(x, y, batch_size=8, verbose=0)
    victim = where.replica_group._children.members[0].pool.followers[0].pid
    killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    killer.start()
    history = model.fit(x, y, batch_size=8, epochs=10, verbose=0).history
    killer.join()
    assert len(history["loss"]) == 10 and history["loss"][-1] < history["loss"][0]
    assert where.stats().applied == 10 * 50


class Raising(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise RuntimeError("enough")


@pytest.mark.timeout(120)
def test_after_an_error_the_model_is_the_users_own() -> None:
    x, y = digits(43)
    with served(sg.Asynchronous(), 2, 1).scope():
        model = mlp()
        model.compile(**momentum())
    with pytest.raises(RuntimeError, match="enough"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Raising()])
    assert "apply" not in model.optimizer.__dict__
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert np.isfinite(model.evaluate(x, y, verbose=0)[0])
    model.fit(x, y, batch_size=8, verbose=0)


class Interrupted(keras.callbacks.Callback):
    """Ctrl-C in the second epoch; a connection may break by it, or a question stay unanswered."""

    def __init__(self, *, breaks: str = "") -> None:
        super().__init__()
        self.breaks, self.epoch = breaks, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch + 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 1 and batch == 2:
            lines = (
                self.model.__dict__["_stratagem"].side.training.client.lines
                if self.breaks
                else None
            )
            if self.breaks == "connection":
                lines.hang_up()
            elif self.breaks == "question":
                lines.write(0, {"t": "so far"})
            raise KeyboardInterrupt


def interrupted(where: Any, **how: Any) -> tuple[Any, Any]:
    x, y = digits(43)
    fit = {"x": x, "y": y, "batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False}
    keras.utils.set_random_seed(7)
    with where.scope() if where is not None else nullcontext():
        model = mlp()
        model.compile(**momentum())
    with pytest.raises(KeyboardInterrupt):
        model.fit(**fit, callbacks=[Interrupted(**how)])
    state = [model.get_weights(), [v.numpy() for v in model.optimizer.variables]]
    model.fit(**fit)
    return state, [model.get_weights(), [v.numpy() for v in model.optimizer.variables]]


@pytest.mark.timeout(120)
def test_interrupted_and_fitted_again() -> None:
    alike(interrupted(None), interrupted(served(SYNC, 2, 2)))


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("breaks", ["connection", "question"])
def test_interrupted_while_a_server_was_talked_to(breaks: str, caplog: Any) -> None:
    """The weights are kept, and the optimizer's state is of one moment, if not of the last."""
    (weights, state), _ = interrupted(None)
    where = sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=1), updates=SYNC)
    try:
        (found, (iterations, *_)), _ = interrupted(where, breaks=breaks)
    finally:
        where.close()
    alike(weights, found)
    assert int(state[0]) == 9 and int(iterations) == 6
    assert "the optimizer's state is that of update 6" in caplog.text


class MySGD(keras.optimizers.SGD):
    pass


class Twice(Own):
    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        return super().train_step(data)


class Silent(Own):
    def train_step(self, data: Any) -> Any:
        return {"loss": self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0]))}


class Clipping(Own):
    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        self.compute_loss(x=x, y=y, y_pred=self(x, training=True)).backward()
        torch.nn.utils.clip_grad_norm_([v.value for v in self.trainable_weights], 0.01)
        with torch.no_grad():
            self.optimizer.apply(
                [v.value.grad for v in self.trainable_weights], self.trainable_weights
            )
        return {"loss": 0.0}


class Squeezing(Own):
    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(keras.ops.clip(weight, -0.1, 0.1))
        return logs


def odd(weights: Any) -> Any:
    return weights


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "optimizer of one's own": (mlp, lambda: {"optimizer": MySGD(), "loss": LOGITS}, "by name"),
    "loss scaling": (
        mlp,
        lambda: {
            "optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "loss": LOGITS,
        },
        "mixed_bfloat16",
    ),
    "a callable rate": (
        mlp,
        lambda: {"optimizer": keras.optimizers.SGD(lambda: 0.1), "loss": LOGITS},
        "learning rate",
    ),
    "a constraint of one's own": (
        lambda: keras.Sequential([keras.Input((8,)), layers.Dense(3, kernel_constraint=odd)]),
        momentum,
        "constraint",
    ),
    "clipping what is accumulated": (
        mlp,
        lambda: momentum(global_clipnorm=1.0, gradient_accumulation_steps=2),
        "leave one of them out",
    ),
    "apply twice": (Twice, momentum, "twice"),
    "no apply": (Silent, momentum, "did not call self.optimizer.apply.*on purpose"),
    "weights written to": (Squeezing, momentum, "averaged copy, set trainable = False.*constraint"),
    "changed gradients": (Clipping, momentum, "changed the gradients"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case: str) -> None:
    build, compile, words = REFUSED[case]
    x, y = digits(43)
    with served(SYNC, 2, 1).scope():
        model = build()
        model.compile(**compile())
    with pytest.raises(sg.errors.StratagemError, match=words):
        model.fit(x, y, batch_size=8, verbose=0)


@pytest.mark.timeout(120)
def test_optimizer_state_changed_by_a_callback_is_refused(tmp_path: Path) -> None:
    class Loading(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                self.model.save_weights(tmp_path / "a.weights.h5")
            self.model.load_weights(tmp_path / "a.weights.h5")

    x, y = digits(43)
    with pytest.raises(sg.UsageError, match=r"model.set_weights"):
        train(
            mlp,
            momentum,
            {"x": x, "y": y, "epochs": 3, "callbacks": [Loading()]},
            served(SYNC, 2, 1),
        )


@pytest.mark.timeout(120)
def test_optimizer_state_changed_when_no_step_follows(tmp_path: Path) -> None:
    class Loading(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                self.model.save_weights(tmp_path / "a.weights.h5")
            if epoch == 2:
                self.model.load_weights(tmp_path / "a.weights.h5")

    alone, spread = both(fit=lambda: {"callbacks": [Loading()]}, where=served(SYNC, 2, 2))
    assert int(spread.optimizer.iterations.numpy()) == 6
    for ours, theirs in zip(alone.optimizer.variables, spread.optimizer.variables, strict=True):
        assert np.abs(ours.numpy() - theirs.numpy()).max() < 2e-6


@pytest.mark.timeout(120)
def test_masks_with_several_losses_are_refused() -> None:
    tokens = keras.Input((7,), dtype="int32")
    h = layers.Embedding(20, 6, mask_zero=True)(tokens)
    with served(SYNC, 2, 1).scope():
        model = keras.Model(
            tokens,
            {
                "each": layers.Dense(4, name="each")(h),
                "all": layers.Dense(1, name="all")(layers.LSTM(3)(h)),
            },
        )
        model.compile(optimizer="sgd", loss={"each": LOGITS, "all": "mse"})
    x = np.random.default_rng(0).integers(0, 20, (16, 7))
    with pytest.raises(sg.errors.StratagemError, match="several losses"):
        model.fit(x, {"each": x % 4, "all": x[:, :1].astype("float32")}, batch_size=8, verbose=0)


@pytest.mark.timeout(120)
def test_asynchronous_workers_may_change_their_gradients() -> None:
    x, y = digits(43)
    with served(sg.Asynchronous(), 1, 1).scope():
        model = Clipping()
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss=LOGITS)
    keras.utils.set_random_seed(7)
    model(x[:1])
    before = np.concatenate([w.ravel() for w in model.get_weights()])
    model.fit(x, y, batch_size=43, verbose=0)
    after = np.concatenate([w.ravel() for w in model.get_weights()])
    assert np.linalg.norm(after - before) == pytest.approx(0.01, rel=1e-3)


def test_a_schedule_without_a_config_is_refused_with_a_sentence() -> None:
    class Mine(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        def __call__(self, step: Any) -> Any:
            return 0.1

    model = mlp()
    with pytest.raises(sg.NotDistributable, match="Mine is not there"):
        keras_recipe.describe(keras.optimizers.SGD(Mine()), model.trainable_variables)
