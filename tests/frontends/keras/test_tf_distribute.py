"""Where code written for tf.distribute no longer runs under Keras 3, or answers wrongly.

One test for each line of the table in docs/keras.md: what TensorFlow 2.21 with Keras 3.15 was seen
to do is in the name or the comment, what must hold is asserted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

import stratagem as sg
from tests.clock import in_time
from tests.keras_support import apart, digits, history_apart, strategy, train
from tests.ports import free_ports
from tests.support import cpus

ROOT = str(Path(sg.__file__).parent.parent)


def start(script: str, index: int, addresses: list[str], **more: str) -> subprocess.Popen[str]:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    environ = {
        **os.environ,
        "TF_CONFIG": json.dumps(config),
        "PYTHONPATH": ROOT,
        "KERAS_BACKEND": "torch",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def start_task(
    script: str, job: str, index: int, cluster: Any, **more: str
) -> subprocess.Popen[str]:
    """A task of any job; a ps task needs no script."""
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    environ = {
        **os.environ,
        "TF_CONFIG": json.dumps(config),
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": "1",
        **more,
    }
    if script:
        environ["KERAS_BACKEND"] = "torch"
    else:
        environ.pop("KERAS_BACKEND", None)
    words = ["-c", textwrap.dedent(script)] if script else ["-m", "stratagem.ps"]
    return subprocess.Popen(
        [sys.executable, *words],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


WORKER = """
    import json, os
    import keras, numpy as np
    import stratagem as sg

    strategy = sg.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(os.getpid())  # the chief's values count

    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)])

    def compile(model):
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      optimizer=keras.optimizers.SGD(0.1, momentum=0.9), metrics=["accuracy"])

    dice = np.random.default_rng(0)
    x, y = dice.normal(size=(83, 8)).astype("float32"), dice.integers(0, 3, 83)
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(epoch)

    with strategy.scope():
        model = build()
        compile(model)
    fit = dict(batch_size=16, epochs=2, verbose=0, validation_split=0.2)
    history = model.fit(x, y, callbacks=[Seen()], **fit).history
    predictions = model.predict(x, verbose=0)
    losses = model.evaluate(x, y, verbose=0)
    alone = build()
    compile(alone)
    plain = alone.fit(x, y, **fit).history
    far = [float(np.abs(a - b).max()) for a, b in zip(alone.get_weights(), model.get_weights())]
    print(json.dumps({
        "apart": max(far), "chief": strategy.is_chief, "callbacks": seen, "history": history,
        "plain": plain, "predictions": predictions.shape, "evaluate": losses,
        "iterations": int(model.optimizer.iterations.numpy()),
    }), flush=True)
    tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch))
    model.fit(x, y, epochs=10**6, batch_size=16, verbose=0, callbacks=[tell])  # to be killed in it
"""


def line_of(task: subprocess.Popen[str], start: str) -> str:
    """Return the next output line with this prefix."""
    assert task.stdout is not None
    seen = []
    for line in task.stdout:
        if line.startswith(start):
            return line
        seen.append(line)
    raise AssertionError("ended early: " + "".join(seen))


@pytest.fixture(scope="module")
def pair() -> Iterator[list[subprocess.Popen[str]]]:
    """Two workers, started once for what is said of them here."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    tasks = [start(WORKER, i, addresses, PYTHONUNBUFFERED="1") for i in range(2)]
    yield tasks
    for task in tasks:
        task.kill()
        task.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_multi_worker_fit_in_two_processes(pair: list[subprocess.Popen[str]]) -> None:
    """TensorFlow: ValueError, a PerReplica value cannot be converted."""
    said = [json.loads(line_of(task, "{")) for task in pair]
    for each in said:
        assert each["history"] == said[0]["history"]
        assert each["evaluate"] == said[0]["evaluate"]
        assert each["predictions"] == [83, 3]
        assert each["iterations"] == 10  # global steps, not steps times replicas
    assert said[0]["chief"] and not said[1]["chief"]
    assert said[0]["callbacks"] == [0, 1] and said[1]["callbacks"] == []
    assert said[0]["apart"] < 1e-6
    assert history_apart(said[0]["plain"], said[0]["history"]) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_killed_in_mid_training_is_named(pair: list[subprocess.Popen[str]]) -> None:
    """TensorFlow: the survivor fails after about 10 s, "restart your program"."""
    chief, other = pair
    line_of(chief, "epoch 2")
    other.kill()
    before = time.monotonic()
    output, _ = chief.communicate(timeout=60)
    assert time.monotonic() - before < 20  # once only: the pair is for both tests
    assert chief.returncode > 0
    last = [line for line in output.splitlines() if line.startswith("stratagem.errors.")][-1]
    assert "worker 1" in last and "worker 0" not in last


SERVED = """
    import json, os, time
    from pathlib import Path
    import keras, numpy as np
    import stratagem as sg

    strategy = sg.ParameterServerStrategy(updates=sg.Synchronous())
    keras.utils.set_random_seed(os.getpid())  # the chief's values count

    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)])

    def compile(model):
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      optimizer=keras.optimizers.SGD(0.1, momentum=0.9), metrics=["accuracy"])

    dice = np.random.default_rng(0)
    x, y = dice.normal(size=(83, 8)).astype("float32"), dice.integers(0, 3, 83)
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(epoch)

    with strategy.scope():
        model = build()
        compile(model)
    fit = dict(batch_size=16, epochs=2, verbose=0, validation_split=0.2)
    history = model.fit(x, y, callbacks=[Seen()], **fit).history
    last = model.train_on_batch(x[:11], y[:11])
    with strategy.scope():
        keras.utils.set_random_seed(os.getpid())
        missed = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        compile(missed)

    def wait_for(file):
        limit = time.monotonic() + 60
        while not file.exists() and time.monotonic() < limit:
            time.sleep(0.01)

    folder = Path(os.environ["DONE"])
    if not strategy.is_chief:  # it comes when all is over
        wait_for(folder / "chief")
    belated = missed.fit(x, y, verbose=0).history
    (folder / ("chief" if strategy.is_chief else "worker")).touch()
    wait_for(folder / "worker")
    alone = build()
    compile(alone)
    plain = alone.fit(x, y, **fit).history
    alone.train_on_batch(x[:11], y[:11])
    far = [float(np.abs(a - b).max()) for a, b in zip(alone.get_weights(), model.get_weights())]
    states = [float(np.abs(a.numpy() - b.numpy()).max())
              for a, b in zip(alone.optimizer.variables, model.optimizer.variables)]
    print(json.dumps({
        "apart": max(far), "states": max(states), "chief": strategy.is_chief, "callbacks": seen,
        "history": history, "plain": plain, "predictions": model.predict(x, verbose=0).shape,
        "evaluate": model.evaluate(x, y, verbose=0), "last": last, "belated": belated,
        "missed": [float(w.sum()) for w in missed.get_weights()] + [
            float(v.numpy().sum()) for v in missed.optimizer.variables],
    }))
"""


#: a server that waits less for a worker that lives and has not begun to train
IMPATIENT = """
    import runpy
    from stratagem.servers import participants
    participants.GATHERING = participants.BUSY = 3.0
    runpy.run_module("stratagem.ps", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_parameter_servers_fit_evaluate_and_predict(tmp_path: Path) -> None:
    """TensorFlow: ValueError, pass this dataset to ClusterCoordinator. Two clients, one server."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    server = start_task(IMPATIENT, "ps", 0, cluster)
    tasks = [start_task(SERVED, "worker", i, cluster, DONE=str(tmp_path)) for i in range(2)]
    said = []
    for task in tasks:
        output, _ = task.communicate(timeout=150)
        assert task.returncode == 0, output
        said.append(json.loads(output.strip().splitlines()[-1]))
    output, _ = server.communicate(timeout=60)
    assert server.returncode == 0, output
    for each in said:
        assert each["history"] == said[0]["history"] and each["last"] == said[0]["last"]
        assert each["evaluate"] == pytest.approx(said[0]["evaluate"])
        assert each["predictions"] == [83, 3]
        assert each["apart"] < 1e-6 and each["states"] < 1e-6
        assert each["belated"] == said[0]["belated"] and each["missed"] == said[0]["missed"]
    assert said[0]["chief"] and not said[1]["chief"]
    assert said[0]["callbacks"] == [0, 1] and said[1]["callbacks"] == []
    assert history_apart(said[0]["plain"], said[0]["history"]) < 1e-5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("updates", [sg.Synchronous(), sg.Asynchronous()], ids=repr)
def test_central_storage_reports_what_one_device_reports(updates: Any) -> None:
    """TensorFlow with two replicas: weights right, loss and metrics wrong."""
    x, y = digits(83)
    build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(3)])  # noqa: E731
    compile = lambda: {  # noqa: E731
        "optimizer": keras.optimizers.SGD(0.0 if updates != sg.Synchronous() else 0.1),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    fit = {"x": x, "y": y, "batch_size": 16, "epochs": 2}
    central = sg.CentralStorageStrategy(cpus(2), "cpu:0", updates=updates)
    try:
        alone, expected = train(build, compile, fit)
        spread, history = train(build, compile, fit, central)
        assert apart(alone, spread) < 1e-6
        assert history_apart(expected, history) < 1e-5
    finally:
        central.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_missing_worker_is_named_and_sigterm_ends_the_wait() -> None:
    """TensorFlow: the constructor blocks silently and ignores SIGTERM."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    task = start("import stratagem as sg; sg.MultiWorkerMirroredStrategy()", 0, addresses)
    assert task.stdout is not None
    line = ""
    while "waiting for worker 1" not in line:
        line = task.stdout.readline()
        assert line, "ended without a word"
    assert addresses[1] in line
    task.send_signal(signal.SIGTERM)
    before = time.monotonic()
    task.communicate(timeout=30)
    in_time(time.monotonic() - before, 5)


def dense(start: float = 1.0, **more: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(
                1, use_bias=False, **more, kernel_initializer=keras.initializers.Constant(start)
            ),
        ]
    )


def one_update(x: Any, y: Any, batch: int, replicas: int, **sgd: Any) -> float:
    """The weight after one epoch of y = w x from w = 1 with squared error."""
    with strategy(replicas).scope():
        model = dense()
        model.compile(optimizer=keras.optimizers.SGD(**sgd), loss="mse")
    model.fit(
        np.array(x, "float32")[:, None],
        np.array(y, "float32")[:, None],
        batch_size=batch,
        shuffle=False,
        verbose=0,
    )
    return float(model.get_weights()[0][0, 0])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "op",
    [
        sg.HierarchicalCopyAllReduce(),
        sg.ReductionToOneDevice(),
        sg.RingAllReduce(),
        sg.SharedMemoryAllReduce(),
    ],
    ids=lambda op: type(op).__name__,
)
def test_every_operation_equals_the_plain_sum_of_three(op: Any) -> None:
    """TensorFlow's hierarchical copy drops the last of an odd number: 1 + 10 + 100 gives 11."""
    three = sg.MirroredStrategy(cpus(3), cross_device_ops=op)
    try:
        values = three.run(lambda: torch.tensor(10.0 ** sg.current_replica().index))
        assert float(three.reduce("sum", values)) == 111.0
        x, _ = digits(33)
        compile = lambda: {"optimizer": "sgd", "loss": "mse"}  # noqa: E731
        fit = {"x": x, "y": x[:, :1], "batch_size": 7}
        build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(1)])  # noqa: E731
        alone, _ = train(build, compile, fit)
        spread, _ = train(build, compile, fit, three)
        assert apart(alone, spread) < 1e-6
    finally:
        three.close()


@pytest.mark.timeout(120)
def test_first_batch_not_divisible_by_the_replicas() -> None:
    """TensorFlow: InvalidArgumentError in AddN. Here dL/dw = mean of 2 (w - y), at 1: -8."""
    assert one_update([1] * 5, [1, 3, 5, 7, 9], 5, 2, learning_rate=0.1) == pytest.approx(1.8)


@pytest.mark.timeout(120)
def test_a_last_batch_of_one_example_counts_in_full() -> None:
    """17 examples, batch 16, 2 replicas: TensorFlow's last update is half of the right one."""
    spread = one_update([1] * 17, [1] * 16 + [3], 16, 2, learning_rate=0.1)
    assert spread == pytest.approx(1 - 0.1 * 2 * (1 - 3))


@pytest.mark.timeout(120)
def test_examples_of_unequal_shares_weigh_the_same() -> None:
    """A batch of 5 split 3 + 2: TensorFlow weighs them 1/6 and 1/4."""
    for which in range(5):
        y = [1.0] * 5
        y[which] = 2.0
        moved = one_update([1] * 5, y, 5, 2, learning_rate=1.0) - 1.0
        assert moved == pytest.approx(2 / 5)


@pytest.mark.timeout(120)
def test_clipping_comes_after_the_reduction() -> None:
    """Gradients +1 and -99, global_clipnorm 1, rate 1: TensorFlow clips first and gives 1.0."""
    y = [1 - 0.5, 1 + 49.5]  # 2 (w - y) is +1 and -99 at w = 1
    assert one_update([1, 1], y, 2, 2, learning_rate=1.0, global_clipnorm=1.0) == pytest.approx(2.0)


@pytest.mark.timeout(120)
def test_dropout_masks_differ_and_repeat_from_one_seed() -> None:
    """Dropout(seed=7): TensorFlow gives both replicas the same mask."""

    class Seeing(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = layers.Dropout(0.5, seed=7)
            self.seen = self.add_weight(shape=(2, 32), trainable=False, initializer="zeros")
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any, training: bool = False) -> Any:
            kept = self.dropout(x, training=training)
            if training:
                index = sg.current_replica().index
                self.seen.assign(keras.ops.zeros((2, 32)))
                with torch.no_grad():
                    self.seen.value[index] = 2.0 * kept.detach().mean(0)  # averaged over two
            return kept * self.scale

    def masks() -> Any:
        keras.utils.set_random_seed(3)
        with strategy(2).scope():
            layer = Seeing()
            model = keras.Sequential([keras.Input((32,)), layer])
            model.compile(optimizer="sgd", loss="mse")
        ones = np.ones((2, 32), "float32")
        model.fit(ones, ones, batch_size=2, verbose=0)
        return layer.seen.numpy()

    first, second = masks(), masks()
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first[0] != first[1]).any()
    assert (first == second).all()


@pytest.mark.timeout(120)
def test_batchnorm_has_one_defined_answer() -> None:
    """x = [0, 2 / 10, 14], momentum 0.5: TensorFlow keeps 0.5 and 6.0, and reads the first."""
    with strategy(2, sync_batchnorm=True).scope():
        norm = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((1,)), norm, layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    x = np.array([[0], [2], [10], [14]], "float32")
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    assert float(norm.moving_mean.numpy()[0]) == pytest.approx(3.25)
    assert float(norm.moving_variance.numpy()[0]) == pytest.approx(16.875)


@pytest.mark.timeout(120)
def test_unsynchronised_batchnorm_is_the_mean_over_replicas() -> None:
    with strategy(2).scope():
        norm = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((1,)), norm, layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    x = np.array([[0], [2], [10], [14]], "float32")
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    assert float(norm.moving_mean.numpy()[0]) == pytest.approx((0.5 + 6.0) / 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outside", ["model", "optimizer", "both"])
def test_made_outside_the_scope(outside: str) -> None:
    """TensorFlow: an AssertionError without a text, and "mixing different strategies"."""
    x, _ = digits(33)
    fit = {"x": x, "y": x[:, :1], "batch_size": 7, "epochs": 2, "verbose": 0}
    build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(1)])  # noqa: E731
    alone, _ = train(
        build,
        lambda: {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"},
        {k: v for k, v in fit.items() if k != "verbose"},
    )
    keras.utils.set_random_seed(7)
    model = build() if outside != "optimizer" else None
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if outside != "model" else None
    with strategy(2).scope():
        model = model if model is not None else build()
        model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model.fit(**fit)
    assert apart(alone, model) < 1e-6


@pytest.mark.timeout(120)
def test_two_strategies_in_one_process() -> None:
    """TensorFlow: shape mismatch in the collective instance."""
    x, _ = digits(33)
    fit = {"x": x, "y": x[:, :1], "batch_size": 7, "epochs": 2}
    build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(1)])  # noqa: E731
    compile = lambda: {"optimizer": "adam", "loss": "mse"}  # noqa: E731
    results = [
        train(build, compile, fit, where)[0]
        for where in (None, strategy(2), strategy(3), strategy(2))
    ]
    assert all(apart(results[0], other) < 2e-6 for other in results[1:])
