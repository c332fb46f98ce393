"""Replicas that die and join at rare moments.

At the end of a call, while replicas regroup, before a checkpoint, and when only the chief is left.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from tests.replicas.scripts import Nursery, Script, nursery
from tests.strategies import test_elastic, test_elastic_loops
from tests.strategies.test_elastic import BATCH, Kills, alike, elastic, kill, net, rows, train
from tests.strategies.test_multi_worker import Cluster

pytestmark = pytest.mark.timeout(120)

STEPS = 10  # of an epoch


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


class KillsAtTheEnd(Kills):
    """Kills a follower after the last step."""

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append(("train end", -1))
        if self.strategy.num_replicas_in_sync > 1:
            kill(self.strategy, 0)


def test_a_follower_dies_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained twice, and the strategy can be used again."""
    monkeypatch.setattr(test_elastic, "Kills", KillsAtTheEnd)
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic()) as several:
        expected = train(one)
        alike(train(several, (30,)), expected)
        alike(train(several), expected)


class SticksOnce:
    """A loss in which one replica hangs once, if a file exists."""

    def __init__(self, mark: Path) -> None:
        self._mark, self._calls = str(mark), 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if sg.current_replica().index == 1 and self._calls == 5 and Path(self._mark).exists():
            Path(self._mark).unlink()
            time.sleep(100)
        return nn.functional.cross_entropy(output, target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "ring"])
def test_one_that_is_stuck_is_removed(
    tmp_path: Path, kind: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A live replica is late: the others wait for `Patience(step=)`, and go on."""
    mark = tmp_path / "mark"
    mark.touch()
    devices = [f"cpu:{i}" for i in range(3)]
    stuck = sg.MirroredStrategy(devices, kind, elastic=True, patience=sg.Patience(step=6))
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(stuck) as several:
        expected, start = train(one), time.monotonic()
        alike(train(several, loss=SticksOnce(mark)), expected)
        assert not mark.exists() and 6 < time.monotonic() - start < 90
    assert "replica 1 (cpu:1" in caplog.text and "has not come to the step" in caplog.text


# --- checkpoints --------------------------------------------------------------------------------


class Counts(sg.callbacks.Callback):
    """A callback with state that kills followers."""

    def __init__(self, strategy: Any = None, at: tuple[int, ...] = ()) -> None:
        self._strategy, self._at = strategy, at
        self.batches = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches in self._at:
            kill(self._strategy, self.batches)


def counted(strategy: Any, folder: Path, at: tuple[int, ...] = (), **options: Any) -> Any:
    torch.manual_seed(5)
    with strategy.scope():
        model = sg.Model(net())
        model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"])
    counts = Counts(strategy, at)
    history = model.fit(
        *rows(),
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        callbacks=[counts],
        checkpoint=sg.Checkpoints(folder, every=1, keep=99),
        **options,
    )
    found = {k: v for k, v in history.history.items() if k != "examples_per_second"}
    return [p.detach().clone() for p in model.module.parameters()], found, counts.batches


def test_checkpoints_after_a_death(tmp_path: Path) -> None:
    """The state of metrics and callbacks is in a checkpoint that is made after a regrouping.

    The checkpoint is from within an epoch, and is resumed on any number of replicas.
    """
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic()) as several:
        expected = counted(one, tmp_path / "one")
        alike(counted(several, tmp_path / "run", (3, 14)), expected)
    saved = sorted(path for path in (tmp_path / "run").iterdir() if path.is_dir())
    for number, steps in enumerate((5, 15, 16)):
        (chosen,) = (path for path in saved if path.name.endswith(f"-step-{steps}"))
        for name, strategy in (
            ("one", sg.MirroredStrategy(["cpu:0"])),
            ("two", sg.MirroredStrategy(["cpu:0", "cpu:1"])),
            ("elastic", elastic(count=2)),
        ):
            folder = tmp_path / f"{name}{number}"
            shutil.copytree(chosen, folder / chosen.name)
            at = (17,) if name == "elastic" else ()
            with closing(strategy):
                alike(counted(strategy, folder, at, resume=True), expected)


# --- SIGTERM ------------------------------------------------------------------------------------

SIGTERM = """
import logging, os, signal, sys, time
import torch
import stratagem as sg
from stratagem.training.replica_group import ReplicaGroup
torch.set_default_dtype(torch.float64)
when = {when!r}

class Signals(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), file=sys.stderr)

def between(*given, regroup=ReplicaGroup._regroup):
    if when == "between":
        os.kill(os.getpid(), signal.SIGTERM)
    return regroup(*given)

ReplicaGroup._regroup = between

def lose(strategy):
    os.kill(strategy.replica_group._pool.followers[0].pid, signal.SIGKILL)
    if when == "before":
        os.kill(os.getpid(), signal.SIGTERM)

logging.getLogger("stratagem").addHandler(Signals())
"""

FIT = (
    SIGTERM
    + """
class Loses(sg.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 3):
            lose(strategy)

from tests.strategies.test_elastic import elastic, net, rows
strategy = elastic(count=2)
torch.manual_seed(5)
with strategy.scope():
    model = sg.Model(net())
    model.compile("sgd", "cross_entropy")
model.fit(*rows(), batch_size=32, epochs=3, verbose=0, callbacks=[Loses()],
          checkpoint=sg.Checkpoints({folder!r}, every=1000), resume=True)
"""
)

LOOP = (
    SIGTERM
    + """
from tests.strategies import test_elastic_loops
from tests.strategies.test_elastic import elastic
strategy = elastic(count=2)
def die(where, now, kills):
    if (where, now) == ("step", (1, 4)) and not lost:
        lost.append(lose(strategy))
lost = []
test_elastic_loops.die = die
strategy.run(test_elastic_loops.loop, strategy, {{"folder": "."}}, 1, 0.0,
             sg.Checkpoints({folder!r}, every=1000))
"""
)


def ran(scripts: Nursery, folder: Path, source: str) -> Script:
    return scripts.start(folder, source, "chief")


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "between"])
@pytest.mark.parametrize("kind", ["fit", "loop"])
def test_sigterm_while_replicas_come_together(
    scripts: Nursery, tmp_path: Path, kind: str, when: str
) -> None:
    """The training saves, and ends with the exit code that says so."""
    source = (FIT if kind == "fit" else LOOP).format(when=when, folder=str(tmp_path / "run"))
    script = ran(scripts, tmp_path, source)
    assert script.ends(60) == 75, script
    assert "The others go on" in script.err and "SIGTERM" in script.err
    newest = sorted(path for path in (tmp_path / "run").iterdir() if path.is_dir())[-1]
    told = json.loads((newest / "manifest.json").read_text())
    assert 14 <= int(newest.name.rpartition("-")[2]) <= 16, told


def test_sigterm_while_there_are_too_few(scripts: Nursery, tmp_path: Path) -> None:
    """The chief waits for `min_replicas`, but ends at once on SIGTERM."""
    cluster = Cluster(scripts, tmp_path, 2)
    folder = str(tmp_path / "run")
    source = test_elastic.WORKER.format(kind=None, least=2, epochs=1000).replace(
        "verbose=0", f"verbose=0, checkpoint=sg.Checkpoints({folder!r}, every=10**6)"
    )
    workers = cluster.all(source)
    workers[0].says("batch 5 2")
    workers[1].signal(signal.SIGKILL)
    workers[0].says("The others go on")
    workers[0].says("waiting for worker 1", 30)
    workers[0].signal(signal.SIGTERM)
    assert workers[0].ends(30) == 75, workers[0]
    assert any((tmp_path / "run").iterdir())


# --- who joins ----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A model with a switch and a number that callbacks change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale, self.flat = 1.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.scale * self.last(hidden if self.flat else torch.tanh(hidden))


class Changes(sg.callbacks.Callback):
    """Freezes a layer, and changes both at the beginning."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.module.scale, self.model.module.flat = 0.7, True
            self.model.module.first.requires_grad_(False)


CHANGED = (
    test_elastic.WORKER.replace("sg.Model(net())", "sg.Model(Scaled())")
    .replace(
        "from tests.strategies.test_elastic import net, rows",
        "from tests.strategies.test_elastic import rows\n"
        "from tests.strategies.test_elastic_corners import Changes, Scaled",
    )
    .replace("callbacks=[Say()]", "callbacks=[Say(), Changes()]")
)


def test_the_chief_alone_takes_one_back_that_knows_nothing(
    scripts: Nursery, tmp_path: Path
) -> None:
    """A new replica gets the attributes and switches that callbacks have changed."""
    epochs = 40
    cluster = Cluster(scripts, tmp_path, 2)
    source = CHANGED.format(kind=None, least=1, epochs=epochs)
    workers = cluster.all(source)
    workers[0].says("batch 25 2")
    workers[1].signal(signal.SIGKILL)
    workers[0].says("batch 35 1")
    cluster.name = "again"
    again = cluster.start(1, source)
    workers[0].says("joins")
    assert workers[0].ends(60) == 0 and again.ends() == 0, (workers, again)
    assert f"batch {epochs * STEPS} 2" in workers[0].out
    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        torch.manual_seed(5)
        with one.scope():
            model = sg.Model(Scaled())
            model.compile(
                lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"]
            )
        history = model.fit(
            *rows(), batch_size=BATCH, epochs=epochs, verbose=0, callbacks=Changes()
        )
    for found in (workers[0], again):
        weights: Any = found.noted("weights")
        for mine, theirs in zip(weights, model.module.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), theirs.detach(), rtol=0, atol=1e-12)
    assert workers[0].noted("accuracy") == pytest.approx(history.history["accuracy"])


def test_the_chief_alone_takes_one_back_in_a_loop(scripts: Nursery, tmp_path: Path) -> None:
    epochs = 40
    cluster = Cluster(scripts, tmp_path, 2)
    source = test_elastic_loops.WORKER.format(kind=None, epochs=epochs)
    workers = cluster.all(source)
    workers[0].says("batch 5 2")
    workers[1].signal(signal.SIGKILL)
    workers[0].says("batch 15 1")
    cluster.name = "again"
    again = cluster.start(1, source)
    workers[0].says("joins")
    assert workers[0].ends(60) == 0 and again.ends() == 0, (workers, again)
    assert f"batch {epochs * STEPS} 2" in workers[0].out
    with closing(sg.MirroredStrategy(["cpu:0"], elastic=True)) as one:
        (expected,) = one.run(test_elastic_loops.talking, one, epochs, 0.0)
    for found in (workers[0], again):
        weights: Any = found.noted("weights")
        for mine, theirs in zip(weights, expected["weights"], strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=1e-12)
        assert found.noted("seen") == expected["seen"]


DIES_WHILE_IT_STARTS = """
import stratagem.training.replica_group as groups
plain, agreed = groups.agree, []
def agree(*args):
    agreed.append(args)
    if me == 2 and len(agreed) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args)
groups.agree = agree
"""


@pytest.mark.slow
def test_a_second_death_while_a_generation_starts(scripts: Nursery, tmp_path: Path) -> None:
    epochs = 10
    cluster = Cluster(scripts, tmp_path, 4)
    workers = cluster.all(
        DIES_WHILE_IT_STARTS + test_elastic.WORKER.format(kind=None, least=1, epochs=epochs)
    )
    workers[0].says("batch 5 4", 60)
    workers[3].signal(signal.SIGKILL)
    assert workers[0].ends(60) == 0 and workers[1].ends() == 0, workers
    assert workers[2].ends() == -signal.SIGKILL
    assert f"batch {epochs * STEPS} 2" in workers[0].out
    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        torch.manual_seed(5)
        with one.scope():
            model = sg.Model(net())
            model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy")
        model.fit(*rows(), batch_size=BATCH, epochs=epochs, verbose=0)
    for found in workers[:2]:
        weights: Any = found.noted("weights")
        for mine, theirs in zip(weights, model.module.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), theirs.detach(), rtol=0, atol=1e-12)
