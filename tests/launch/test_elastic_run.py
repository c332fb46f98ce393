"""`stratagem run` with tasks that are killed: the job goes on, with the result of one device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.clock import PATIENCE, SLOWER, unless_late
from tests.hosts import ROOT
from tests.launch.run_processes import Launcher
from tests.strategies.test_elastic import ROWS, net, rows

pytestmark = pytest.mark.timeout(200)

EPOCHS = 8
SOURCE = """
import torch
import stratagem as sg
from tests.strategies.test_elastic import net, rows
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
me = f"{task['type']} {index}"
note(f"task-{me}", os.getpid())
strategy = %(strategy)s

class Kill(sg.callbacks.Callback):
    "Each of these tasks is killed once, after so many steps of the chief."
    seen = 0
    def on_batch_end(self, batch, logs=None):
        self.seen += 1  # goes on in the next chief's
        for name, step in %(kills)r.items():
            back = name != me or %(together)s  # the chief only when all are here again
            if self.seen >= step and back and not os.path.exists(f"killed {name}"):
                pid = pathlib.Path(f"task-{name}").read_text()
                note(f"killed {name}", "")
                os.kill(int(pid), signal.SIGKILL)
                if %(waits)r and name != me:  # until it is started again, and has imported torch
                    until = time.monotonic() + 60
                    while pathlib.Path(f"task-{name}").read_text() == pid:
                        time.sleep(0.05)
                        if time.monotonic() > until:
                            sys.exit("it was not started again")
        time.sleep(%(pause)s)

torch.manual_seed(5)
x, y = rows()
with strategy.scope():
    model = sg.Model(net())
    model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"])
kill = Kill()
history = model.fit(x, y, batch_size=32, epochs=%(epochs)d, verbose=0, callbacks=[kill],
                    checkpoint=sg.Checkpoints("saved", every=5), resume=True)
if strategy.is_chief:
    weights = [p.tolist() for p in model.module.parameters()]
    told = {k: history.history[k] for k in ("loss", "accuracy")}
    note("result", json.dumps({"weights": weights, "history": told, "by": me, "seen": kill.seen}))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    yield found
    found.end()


def run(
    launcher: Launcher, strategy: str, kills: dict[str, int], *options: str, pause: str = "0.02"
) -> str:
    """Run the job to its end; return its output."""
    waits = "--task-restarts" in options
    words = {"strategy": strategy, "kills": kills, "pause": pause, "waits": waits, "epochs": EPOCHS}
    words["together"] = "strategy.num_replicas_in_sync == 2" if waits else "True"
    job = launcher(SOURCE % words, *options, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    said = job.communicate(timeout=150 * SLOWER)[1]
    assert job.returncode == 0, said
    for name in kills:
        unless_late((launcher.where / f"killed {name}").exists(), said)
    return said


def check(launcher: Launcher, atol: float) -> dict[str, Any]:
    """Check that the result is that of one device without faults."""
    found: dict[str, Any] = json.loads((launcher.where / "result").read_text())
    torch.set_default_dtype(torch.float64)
    try:
        with closing(sg.MirroredStrategy(["cpu:0"])) as one:
            torch.manual_seed(5)
            x, y = rows()
            with one.scope():
                model = sg.Model(net())
                model.compile(
                    lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"]
                )
            history = model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0).history
        for mine, theirs in zip(found["weights"], model.module.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), theirs.detach(), rtol=0, atol=atol)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, values in found["history"].items():
        assert values == pytest.approx(history[name], abs=1e-9), name
    return found


def test_a_worker_is_started_again_and_joins_then_the_chief(launcher: Launcher) -> None:
    """No other task is restarted, and another worker is the chief from then on."""
    strategy = "sg.MultiWorkerMirroredStrategy(elastic=True)"
    kills = {"worker 1": 12, "worker 0": 30}
    pause = "0.01 if strategy.num_replicas_in_sync == 2 else 1.5"  # it has time to come
    said = run(launcher, strategy, kills, "--workers", "2", "--task-restarts", "3", pause=pause)
    for name in kills:
        assert f"{name} was killed by SIGKILL, and is started again" in said.replace(
            "; out of memory?", ""
        ), said
    assert said.count("joins the job") >= 2 and "worker 1 (" in said, said
    assert "is the chief now" in said, said
    found = check(launcher, 1e-12)
    assert found["by"] == "worker 1"


@pytest.mark.parametrize("communication", [None, "ring"])
def test_the_chief_is_killed_and_the_others_go_on(
    launcher: Launcher, communication: str | None
) -> None:
    """Weights, losses and metrics are those of one device; the callbacks of the chief go on."""
    strategy = f"sg.MultiWorkerMirroredStrategy({communication!r}, elastic=True)"
    said = run(launcher, strategy, {"worker 0": 20}, "--workers", "3")
    assert "worker 0 was killed by SIGKILL" in said and "the others go on" in said, said
    assert "starting it again" not in said and "is started again" not in said
    found = check(launcher, 1e-12)
    assert found["by"] == "worker 1" and found["seen"] == EPOCHS * -(-ROWS // 32)


ENDS = """
import torch
import stratagem as sg
from tests.strategies.test_elastic import net, rows
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
strategy = sg.MultiWorkerMirroredStrategy(elastic=True)

def die(where):
    if index == 0 and where == %(where)r:
        os.kill(os.getpid(), signal.SIGKILL)

class Rate(sg.callbacks.Callback):
    def __init__(self):
        self.calls = []
    def on_train_begin(self, logs=None):
        die("train_begin")
        self.model.optimizer.param_groups[0]["lr"] *= 0.5
        self.calls.append("train_begin")
    def on_epoch_begin(self, epoch, logs=None):
        die("epoch_begin")
        self.model.optimizer.param_groups[0]["lr"] *= 0.9
        self.calls.append("epoch_begin")
    def on_train_end(self, logs=None):
        die("train_end")
        self.calls.append("train_end")

torch.manual_seed(5)
with strategy.scope():
    model = sg.Model(net())
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
rate = Rate()
for _ in range(%(fits)d):
    model.fit(*rows(), batch_size=32, epochs=2, verbose=0, callbacks=[rate])
die("after")
if strategy.is_chief:
    weights = [p.tolist() for p in model.module.parameters()]
    note("result", json.dumps([weights, rate.calls]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "fits"), [("train_begin", 2), ("epoch_begin", 2), ("train_end", 2)]
)
def test_the_chief_is_killed_where_a_training_begins_or_ends(
    launcher: Launcher, where: str, fits: int
) -> None:
    """Every callback is called once, and the next training has the same order of the data."""
    source = ENDS % {"where": where, "fits": fits}
    job = launcher(source, "--workers", "3", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    said = job.communicate(timeout=150 * SLOWER)[1]
    assert job.returncode == 0 and "is the chief now" in said, said
    weights, calls = json.loads((launcher.where / "result").read_text())
    assert calls == ["train_begin", "epoch_begin", "epoch_begin", "train_end"] * fits
    torch.set_default_dtype(torch.float64)
    try:
        with closing(sg.MirroredStrategy(["cpu:0"])) as one:
            torch.manual_seed(5)
            with one.scope():
                model = sg.Model(net())
                model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
            rate = 0.1
            for _ in range(fits):
                rates = [rate * 0.45, rate * 0.405]
                schedule = sg.callbacks.LearningRateScheduler(lambda e, r, of=rates: of[e])
                model.fit(*rows(), batch_size=32, epochs=2, verbose=0, callbacks=[schedule])
                rate = rates[-1]
        for mine, theirs in zip(weights, model.module.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), theirs.detach(), rtol=0, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_the_chief_is_killed_after_its_last_call(launcher: Launcher) -> None:
    """No other task would save the result: the job fails, and names the killed task."""
    source = ENDS % {"where": "after", "fits": 1}
    job = launcher(source, "--workers", "3", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    said = job.communicate(timeout=150 * SLOWER)[1]
    assert job.returncode == 137 and "worker 0 failed first: killed by SIGKILL" in said, said


LOOP = """
import torch
import stratagem as sg
from torch.utils.data import DataLoader, TensorDataset
from tests.strategies.test_elastic import net, rows
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
x, y = rows()
strategy = sg.MultiWorkerMirroredStrategy(elastic=True)

def train():
    torch.manual_seed(5)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    model, optimizer, loader = strategy.prepare(model, optimizer, data)
    losses = []
    loader.remember(losses=losses)
    for epoch in loader.epochs(4):
        for a, b in loader:
            loss = torch.nn.functional.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(strategy.mean(loss))
            if len(losses) == {0: 13, 1: 16}.get(index):
                os.kill(os.getpid(), signal.SIGKILL)
    return [[p.tolist() for p in model.parameters()], losses]

found = strategy.run(train)[0]
if strategy.is_chief:
    note("result", json.dumps(found))
"""


@pytest.mark.slow
def test_the_chiefs_of_a_custom_loop_are_killed(launcher: Launcher) -> None:
    """Another process goes on from its own state, in the same order of the data.

    A second chief is killed in the same epoch.
    """
    job = launcher(LOOP, "--workers", "3", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    said = job.communicate(timeout=100 * SLOWER)[1]
    assert job.returncode == 0 and said.count("is the chief now") == 2, said
    weights, losses = json.loads((launcher.where / "result").read_text())
    torch.set_default_dtype(torch.float64)
    try:
        x, y = rows()
        torch.manual_seed(5)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        seen = []
        for _ in range(4):
            for a, b in DataLoader(TensorDataset(x, y), 32, shuffle=True):
                loss = torch.nn.functional.cross_entropy(model(a), b)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(float(loss.detach()))
        for mine, theirs in zip(weights, model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), theirs.detach(), rtol=0, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
    assert losses == pytest.approx(seen, abs=1e-12)


@pytest.mark.slow
def test_servers_without_a_backup_are_started_again(launcher: Launcher) -> None:
    """Workers go back to the last checkpoint, without being restarted; ps 0 is killed, too."""
    strategy = "sg.ParameterServerStrategy(updates=sg.Synchronous())"
    sizes = ("--workers", "2", "--ps", "2", "--task-restarts", "2")
    said = run(launcher, strategy, {"ps 1": 12, "ps 0": 40}, *sizes)
    for name in ("ps 1", "ps 0"):
        assert f"{name} was killed by SIGKILL" in said and f"{name} is lost" in said, said
    assert said.count("is started again") == 2 and "worker 1 was" not in said, said
    check(launcher, 1e-12)


@pytest.mark.slow
def test_a_server_without_a_backup_dies(launcher: Launcher) -> None:
    """The job ends and names it; started again, it goes on from the last checkpoint."""
    strategy = "sg.ParameterServerStrategy(updates=sg.Synchronous())"
    said = run(launcher, strategy, {"ps 1": 33}, "--workers", "2", "--ps", "2", "--restarts", "1")
    assert "ps 1 failed first: killed by SIGKILL" in said and "ps 1 is lost" in said
    assert said.count("starting it again") == 1
    check(launcher, 1e-9)


KERAS = """
import keras
import stratagem as sg
from tests.frontends.keras.test_elastic import net, rows
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
strategy = sg.MultiWorkerMirroredStrategy(elastic=True)

class Kill(keras.callbacks.Callback):
    "After the fourth batch of the third epoch, once."
    epoch, first = 0, None
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_begin(self, batch, logs=None):
        self.first = self.first or [self.epoch, batch]
    def on_train_batch_end(self, batch, logs=None):
        if [self.epoch, batch] == [2, 3] and not os.path.exists("killed"):
            note("killed", "")
            os.kill(os.getpid(), signal.SIGKILL)

with strategy.scope():
    model = net()
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
rate = keras.callbacks.LearningRateScheduler(lambda epoch, now: now * 0.9)
kept, kill = keras.callbacks.BackupAndRestore("backup", save_freq=2), Kill()
history = model.fit(*rows(), batch_size=16, epochs=3, verbose=0, callbacks=[rate, kept, kill])
if strategy.is_chief:
    weights = [w.tolist() for w in model.get_weights()]
    note("result", json.dumps([weights, history.history["loss"][-1], kill.first]))
"""


@pytest.mark.slow
def test_the_chief_of_a_keras_model_is_killed(launcher: Launcher) -> None:
    """Only the chief has Keras' loop: the job restarts, and goes on with the next batch."""
    import keras

    from tests.frontends.keras import test_elastic

    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    job = launcher(KERAS, "--workers", "2", "--restarts", "1", **environ)
    said = job.communicate(timeout=150 * SLOWER)[1]
    assert job.returncode == 0 and "the chief alone runs Keras' loop" in said, said
    weights, loss, first = json.loads((launcher.where / "result").read_text())
    assert first == [2, 4], said
    for name in ("float64", "float32"):
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)
        if name == "float64":
            model = test_elastic.net()
            model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
            rate = keras.callbacks.LearningRateScheduler(lambda epoch, now: now * 0.9)
            given = {"batch_size": 16, "epochs": 3, "verbose": 0, "callbacks": [rate]}
            history = model.fit(*test_elastic.rows(), **given).history
    for mine, theirs in zip(weights, model.get_weights(), strict=True):
        found = torch.tensor(mine, dtype=torch.float64)
        assert torch.allclose(found, torch.as_tensor(theirs), rtol=0, atol=1e-6)
    assert loss == pytest.approx(history["loss"][-1], abs=1e-6)


def test_who_is_started_again_when_all_is_over_does_not_fail_the_job(launcher: Launcher) -> None:
    script = """
if task["type"] == "worker" and index == 1:
    if not os.path.exists("died"):
        note("died", 1)
        os.kill(os.getpid(), signal.SIGKILL)
    note("again", 1)
    time.sleep(600)  # for servers that are gone
while not os.path.exists("again"):
    time.sleep(0.01)
"""
    sizes = ("--workers", "2", "--ps", "1", "--task-restarts", "1", "--grace", "0.5")
    job = launcher(script, *sizes)
    _, said = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert "worker 1 comes too late; the job is done." in said


def test_who_comes_to_an_elastic_job_that_is_done_is_ended_without_an_error(
    launcher: Launcher,
) -> None:
    script = """
import stratagem as sg
strategy = sg.MultiWorkerMirroredStrategy(elastic=True)
if index == 1 and os.path.exists("died"):
    note("again", 1)
strategy.run(int)
if index == 1:
    note("died", 1)
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("again"):
    time.sleep(0.01)
time.sleep(0.5)  # for the other one to ask the launcher
"""
    sizes = ("--workers", "2", "--task-restarts", "1")
    job = launcher(script, *sizes, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    _, said = job.communicate(timeout=PATIENCE)
    assert "Traceback" not in said and job.returncode == 0, said
    assert "worker 1 comes too late; the job is done." in said
