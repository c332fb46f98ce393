"""Replicas die and join while a Keras model's `fit` goes on, and the result is that of one device:
weights, losses, metrics, and the calls of callbacks."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import ReplicaFailed, ReplicaLost
from tests.replicas.scripts import Nursery, nursery
from tests.strategies.test_elastic import killing
from tests.strategies.test_multi_worker import Cluster

pytestmark = pytest.mark.timeout(120)

ROWS, BATCH, EPOCHS = 100, 16, 2


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Losses of Keras are float32 all the same."""
    for name in ("float64", "float32"):
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)
        if name == "float64":
            yield


def rows(count: int = ROWS) -> tuple[Any, Any]:
    dice = np.random.default_rng(1)
    return dice.normal(size=(count, 8)), dice.normal(size=(count, 4))


def net() -> Any:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )


@keras.saving.register_keras_serializable("tests")
class TwoUpdates(keras.Model):
    """A step that makes two updates: it can break off between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = net()

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inside(x, training=training)

    def train_step(self, data: Any) -> Any:
        x, y = data
        for _ in range(2):
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            weights = self.trainable_weights
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


class Kills(keras.callbacks.Callback):
    """Kills a follower before or after some batches; notes every call."""

    def __init__(self, strategy: Any, begin: Sequence[int] = (), end: Sequence[int] = ()) -> None:
        super().__init__()
        self.strategy, self.begin, self.end = strategy, begin, end
        self.calls: list[Any] = []
        self.begun = self.ended = 0

    def kill(self, which: int) -> None:
        followers = self.strategy.replica_group._pool.followers
        os.kill(followers[which % len(followers)].pid, signal.SIGKILL)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("begin", batch))
        self.begun += 1
        if self.begun in self.begin:
            self.kill(self.begun)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("end", batch))
        self.ended += 1
        if self.ended in self.end:
            self.kill(self.ended)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.02

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("test", batch))
        if self.begin and batch == 1:
            self.kill(batch)


class BatchLogs(keras.callbacks.Callback):
    """Reads the logs of each batch, so that they are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])


class Slow(keras.losses.Loss):
    """Sleeps after each batch, so that a process can be killed."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        time.sleep(0.02)
        return keras.losses.mean_squared_error(y_true, y_pred)


Result = tuple[list[Any], dict[str, list[float]], list[Any]]


def train(
    strategy: Any,
    begin: Sequence[int] = (),
    end: Sequence[int] = (),
    build: Any = net,
    slow: bool = False,
) -> Result:
    loss = Slow() if slow else keras.losses.MeanSquaredError()
    with nullcontext() if strategy is None else strategy.scope():
        model = build()
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"])
    kills, seen = Kills(strategy, begin, end), BatchLogs()
    keras.utils.set_random_seed(3)
    history = model.fit(
        *rows(),
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=rows(60),
        validation_batch_size=BATCH,
        verbose=0,
        callbacks=[kills, seen],
    )
    state = [v.numpy() for v in model.optimizer.variables]
    return [*model.get_weights(), *state], history.history, [*kills.calls, *seen.losses]


def alike(found: Result, expected: Result, within: float = 1e-6) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert np.allclose(mine, theirs, rtol=0, atol=within)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        assert found[1][name] == pytest.approx(values, abs=within), name
    calls = [[each for each in one[2] if isinstance(each, tuple)] for one in (found, expected)]
    assert calls[0] == calls[1], "callbacks are called once for everything that happens"
    losses = [[each for each in one[2] if not isinstance(each, tuple)] for one in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=within)


def elastic(kind: str | None = None, count: int = 3) -> sg.MirroredStrategy:
    return sg.MirroredStrategy([f"cpu:{i}" for i in range(count)], kind, elastic=True)


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        (None, net),
        pytest.param("ring", net, marks=pytest.mark.slow),
        pytest.param(None, TwoUpdates, marks=pytest.mark.slow),
    ],
    ids=["memory", "ring", "two updates"],
)
def test_kills_change_nothing(kind: str | None, build: Any) -> None:
    """In mid-epoch, at the first batch of all, at the last one of an epoch, and in validations."""
    expected = train(None, build=build)
    with closing(elastic(kind)) as several:
        undisturbed = train(several, build=build)
        found = train(several, (1, 5, 9), (7, 14), build=build)
        assert several.num_replicas_in_sync == 3
    alike(found, expected)
    alike(found, undisturbed, 1e-13)
    assert not np.allclose(found[0][0], build().get_weights()[0])


#: of this process
_losses = itertools.count(1)


class Dies(keras.losses.Loss):
    """Kills the last replica at its fourth loss, three times in all; a file tells how often."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = str(file)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if sg.current_replica().index == 2 and next(_losses) == 4:
            with open(self.file, "a") as file:
                print(os.getpid(), file=file)
            if len(Path(self.file).read_text().split()) <= 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return keras.losses.mean_squared_error(y_true, y_pred)


@pytest.mark.parametrize("build", [net, TwoUpdates])
def test_deaths_within_steps(tmp_path: Path, build: Any) -> None:
    """Nobody looks at single batches, so counts stay where they are made until they are asked for;
    and half of a step of one's own is undone."""
    found: list[Result] = []
    with closing(elastic()) as several:
        for strategy in (None, several):
            with nullcontext() if strategy is None else strategy.scope(check=False):
                model = build()
                model.compile(
                    keras.optimizers.Adam(0.01), Dies(tmp_path / "kills"), metrics=["mae"]
                )
            keras.utils.set_random_seed(3)
            history = model.fit(*rows(), batch_size=BATCH, epochs=EPOCHS, verbose=0).history
            state = [v.numpy() for v in model.optimizer.variables]
            found.append(([*model.get_weights(), *state], history, []))
    assert len((tmp_path / "kills").read_text().split()) >= 3
    alike(found[1], found[0])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kills_at_any_moment(seed: int) -> None:
    expected = train(None, slow=True)
    with closing(elastic()) as several, killing(several, seed, 3):
        found = train(several, slow=True)
    alike(found, expected)


def test_the_last_moment_and_other_calls() -> None:
    """A follower dies after the last batch, and between two calls; nothing is trained twice."""
    x, y = rows()
    keras.utils.set_random_seed(3)
    with closing(elastic()) as strategy:
        with strategy.scope():
            model = net()
            model.compile("sgd", keras.losses.MeanSquaredError())
        kills = Kills(strategy, end=[7])
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[kills])
        assert int(model.optimizer.iterations) == 7
        whole = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        plain = model.predict(x, batch_size=BATCH, verbose=0)
        for which in (0, 1):
            os.kill(strategy.replica_group._pool.followers[which].pid, signal.SIGKILL)  # type: ignore[attr-defined]
            assert model.evaluate(x, y, batch_size=BATCH, verbose=0) == pytest.approx(whole)
        with killing(strategy, 1, 2) as killed:
            while len(killed) < 2:
                again = model.predict(x, batch_size=2, verbose=0)
        assert np.allclose(again, plain, rtol=0, atol=1e-6)
        assert int(model.optimizer.iterations) == 7
    keras.utils.set_random_seed(3)
    one = net()
    one.compile("sgd", keras.losses.MeanSquaredError())
    one.fit(x, y, batch_size=BATCH, verbose=0)
    for mine, theirs in zip(model.get_weights(), one.get_weights(), strict=True):
        assert np.allclose(mine, theirs, rtol=0, atol=1e-6)


class Mistake(keras.losses.Loss):
    """Raises an exception on the followers, which is not a loss of a replica."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if sg.current_replica().index:
            raise ZeroDivisionError("by intention")
        return keras.losses.mean_squared_error(y_true, y_pred)


class Poison(keras.losses.Loss):
    """Kills every follower as soon as it trains."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if sg.current_replica().index:
            os.kill(os.getpid(), signal.SIGKILL)
        return keras.losses.mean_squared_error(y_true, y_pred)


@pytest.mark.parametrize(("loss", "error"), [(Poison, ReplicaLost), (Mistake, ReplicaFailed)])
def test_what_would_come_again_ends_the_job(loss: Any, error: type[Exception]) -> None:
    with closing(elastic()) as strategy:
        with strategy.scope(check=False):
            model = net()
            model.compile("sgd", loss())
        with pytest.raises(error):
            model.fit(*rows(), batch_size=BATCH, verbose=0)


# --- workers of a cluster -----------------------------------------------------------------------

WORKER = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")

class Say(keras.callbacks.Callback):
    seen = 0
    def on_train_batch_end(self, batch, logs=None):
        Say.seen += 1
        print("batch", Say.seen, strategy.num_replicas_in_sync, flush=True)
        time.sleep(0.02)

strategy = sg.MultiWorkerMirroredStrategy({kind!r}, elastic=True, patience=sg.Patience(arrive=20))
from tests.frontends.keras.test_elastic import compiled, rows
with strategy.scope():
    model = compiled()
keras.utils.set_random_seed(3)
history = model.fit(*rows(), batch_size=16, epochs={epochs}, verbose=0, callbacks=[Say()])
print("weights =", json.dumps([w.tolist() for w in model.get_weights()]))
print("history =", json.dumps(history.history), flush=True)
"""


def compiled() -> Any:
    model = net()
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.MeanSquaredError(),
        metrics=["mae"],
    )
    return model


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


def test_workers_leave_and_join(scripts: Nursery, tmp_path: Path) -> None:
    """A replica dies; the chief goes on alone, and the replica joins again when it is restarted."""
    epochs = 60
    cluster = Cluster(scripts, tmp_path, 2)
    source = WORKER.format(kind=None, epochs=epochs)
    workers = cluster.all(source)
    workers[0].says("batch 5 2", 60)
    workers[1].signal(signal.SIGKILL)
    workers[0].says("batch 15 1")
    cluster.name = "again"
    again = cluster.start(1, source)
    workers[0].says("joins", 60)
    assert workers[0].ends(60) == 0 and again.ends() == 0, (workers, again)
    assert f"batch {epochs * 7} 2" in workers[0].out
    keras.utils.set_random_seed(3)
    model = compiled()
    keras.utils.set_random_seed(3)
    history = model.fit(*rows(), batch_size=16, epochs=epochs, verbose=0).history
    for found in (workers[0], again):
        weights: Any = found.noted("weights")
        for mine, theirs in zip(weights, model.get_weights(), strict=True):
            assert np.allclose(np.array(mine), theirs, rtol=0, atol=1e-6)
    told: Any = workers[0].noted("history")
    for name, values in history.items():
        assert told[name] == pytest.approx(values, abs=1e-6)
