"""Replicas die and join during `fit`; weights, losses, metrics and callbacks equal one device's."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ReplicaFailed, ReplicaLost
from stratagem.training.replica import current_replica
from tests.clock import unless_late
from tests.replicas.scripts import Nursery, nursery, wait_for
from tests.strategies.test_multi_worker import Cluster

pytestmark = pytest.mark.timeout(120)

ROWS, BATCH, EPOCHS = 300, 32, 3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=dice)
    return x, torch.randint(0, 4, (ROWS,), generator=dice)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Kills(sg.callbacks.Callback):
    """Kills a follower after some batches; records every call."""

    def __init__(self, at: Sequence[int] = ()) -> None:
        self.at, self.calls, self.seen = at, [], 0
        self.strategy: Any = None

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("begin", batch))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("end", batch))
        self.seen += 1
        if self.seen in self.at:
            kill(self.strategy, self.seen)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch end", epoch))


def kill(strategy: Any, which: int) -> None:
    followers = strategy.replica_group._pool.followers
    os.kill(followers[which % len(followers)].pid, signal.SIGKILL)


def train(
    strategy: sg.MirroredStrategy,
    kills: Sequence[int] = (),
    *,
    data: Callable[[], Any] = rows,
    loss: Any = "cross_entropy",
    **options: Any,
) -> tuple[list[torch.Tensor], dict[str, Any], list[Any]]:
    torch.manual_seed(5)
    with strategy.scope():
        model = sg.Model(net())
        model.compile(
            lambda p: torch.optim.Adam(p, lr=1e-2),
            loss,
            metrics=["accuracy"],
            accumulate=options.pop("accumulate", 1),
        )
    if options.pop("validate", False):
        options["validation_data"] = rows()
    callback = Kills(kills)
    callback.strategy = strategy
    given = data()
    arrays = isinstance(given, tuple)
    history = model.fit(
        *(given if arrays else (given,)),
        batch_size=BATCH if arrays else None,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[callback],
        **options,
    )
    found = {k: v for k, v in history.history.items() if k != "examples_per_second"}
    return [p.detach().clone() for p in model.module.parameters()], found, callback.calls


def alike(found: Any, expected: Any, moved: bool = True) -> None:
    for mine, theirs, before in zip(found[0], expected[0], net().parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-13)
        assert not torch.allclose(mine, before)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        assert found[1][name] == pytest.approx(values, abs=1e-12), name
    assert found[2] == expected[2], "callbacks are called once for everything that happens"


def elastic(kind: str | None = None, count: int = 3) -> sg.MirroredStrategy:
    return sg.MirroredStrategy([f"cpu:{i}" for i in range(count)], kind, elastic=True)


def loader(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows()), BATCH, shuffle=True, num_workers=workers)


CASES: dict[str, dict[str, Any]] = {
    "arrays": {"validate": True},
    "loader": {"data": loader},
    "loader with workers": {"data": lambda: loader(1)},
    "accumulate": {"accumulate": 3},
}


@pytest.mark.parametrize("kind", [None, "ring"])
@pytest.mark.parametrize("case", CASES)
def test_kills_change_nothing(case: str, kind: str | None) -> None:
    """Three kills in three epochs: within an epoch, at the last batch, at the first one."""
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic(kind)) as several:
        expected = train(one, **CASES[case])
        found = train(several, (4, 10, 21), **CASES[case])
        assert several.num_replicas_in_sync == 3
    alike(found, expected)


def test_a_kill_in_the_epoch_that_was_gone_on_with(tmp_path: Path) -> None:
    """A checkpoint's digest of row numbers is that of the batches before it."""
    kept = sg.Checkpoints(tmp_path, every=4, keep=99)
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic("ring")) as several:
        expected = train(one, data=loader, checkpoint=kept)
        for path in sorted(tmp_path.glob("*-step-*"))[1:]:
            shutil.rmtree(path)
        found = train(several, (7,), data=loader, checkpoint=kept, resume=True)
    alike(found, expected)


@contextmanager
def killing(
    strategy: Any, seed: int, times: int, begun: Callable[[], bool] = lambda: True
) -> Iterator[list[float]]:
    """Kill followers at random moments after the call has `begun`, with pauses."""
    dice, over, killed = random.Random(seed), threading.Event(), []

    def run() -> None:
        while len(killed) < times and not over.wait(dice.uniform(0.05, 0.4)):
            pool = strategy.replica_group._pool
            if not begun():
                continue
            try:
                os.kill(dice.choice(pool.followers).pid, signal.SIGKILL)
            except (AttributeError, IndexError, ProcessLookupError):
                continue  # between two generations
            killed.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
    unless_late(killed, "nobody was killed, by chance")


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment(seed: int) -> None:
    slow = {"loss": Slow()}
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic()) as several:
        expected = train(one, **slow)
        with killing(several, seed, 3):
            found = train(several, **slow)
    alike(found, expected)


class Slow:
    """A slow loss, during which a replica can be killed."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return nn.functional.cross_entropy(output, target)


def test_evaluation_is_done_again() -> None:
    x, y = rows()
    with closing(elastic()) as strategy:
        with strategy.scope():
            model = sg.Model(net())
            model.compile("sgd", Slow(), metrics=["accuracy"])
        before = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        with killing(strategy, 7, 1) as killed:
            while not killed:
                after = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    assert after == pytest.approx(before)


class Poison:
    """Kills every replica but the chief as soon as it trains."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if current_replica().index:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(output, target)


class Mistake:
    """Raises at every attempt."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if current_replica().index:
            raise ZeroDivisionError("by intention")
        return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(("loss", "error"), [(Poison(), ReplicaLost), (Mistake(), ReplicaFailed)])
def test_what_would_come_again_ends_the_job(loss: Any, error: type[Exception]) -> None:
    with closing(elastic()) as strategy, pytest.raises(error):
        train(strategy, loss=loss)


# --- workers of a cluster -----------------------------------------------------------------------

WORKER = """
torch.set_default_dtype(torch.float64)

class Say(sg.callbacks.Callback):
    seen = 0
    def on_batch_end(self, batch, logs=None):
        Say.seen += 1
        print("batch", Say.seen, strategy.num_replicas_in_sync, flush=True)
        time.sleep(0.02)

strategy = sg.MultiWorkerMirroredStrategy({kind!r}, elastic=True, min_replicas={least},
                                          patience=sg.Patience(arrive=20))
torch.manual_seed(5)
from tests.strategies.test_elastic import net, rows
x, y = rows()
with strategy.scope():
    model = sg.Model(net())
    model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs={epochs}, verbose=0, callbacks=[Say()])
print("weights =", json.dumps([p.tolist() for p in model.module.parameters()]))
print("accuracy =", json.dumps(history.history["accuracy"]), flush=True)
"""


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()


@pytest.mark.parametrize("kind", [None, "ring"])
def test_workers_leave_and_join(scripts: Nursery, tmp_path: Path, kind: str | None) -> None:
    epochs = 30
    cluster = Cluster(scripts, tmp_path, 3)
    source = WORKER.format(kind=kind, least=1, epochs=epochs)
    workers = cluster.all(source)
    workers[0].says("batch 5 3")
    workers[2].signal(signal.SIGKILL)
    workers[0].says("batch 15 2")
    cluster.name = "again"
    again = cluster.start(2, source)
    workers[0].says("joins")
    wait_for(lambda: workers[0].out.rstrip().endswith(" 3"), what=str(workers[0]))
    workers[1].signal(signal.SIGKILL)
    assert workers[0].ends(60) == 0 and again.ends() == 0, (workers, again)
    assert "worker 2 (127" in workers[1].err and "joins" in workers[0].err
    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        torch.manual_seed(5)
        x, y = rows()
        with one.scope():
            model = sg.Model(net())
            model.compile(
                lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"]
            )
        history = model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    for found in (workers[0], again):
        weights: Any = found.noted("weights")
        for mine, theirs in zip(weights, model.module.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), theirs.detach(), rtol=0, atol=1e-12)
    assert workers[0].noted("accuracy") == pytest.approx(history.history["accuracy"])


def test_too_few_workers_end_the_job(scripts: Nursery, tmp_path: Path) -> None:
    cluster = Cluster(scripts, tmp_path, 2)
    source = WORKER.format(kind=None, least=2, epochs=1000).replace("arrive=20", "arrive=3")
    workers = cluster.all(source)
    workers[0].says("batch 5 2")
    workers[1].signal(signal.SIGKILL)
    assert workers[0].ends(30) == 1
    assert "ReplicaLost: worker 1" in workers[0].err, workers[0]
