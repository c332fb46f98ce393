"""Replicas die and join during a custom loop, and the result is that of one device."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ReplicaLost
from tests.replicas.scripts import Nursery, nursery, wait_for
from tests.strategies.test_elastic import BATCH, EPOCHS, ROWS, elastic, killing, net, rows
from tests.strategies.test_multi_worker import Cluster

pytestmark = pytest.mark.timeout(120)

STEPS = -(-ROWS // BATCH)
NAMES = ("weights", "losses", "seen", "rate", "state")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def die(where: str, now: tuple[int, int], kills: dict[str, Sequence[tuple[int, int]]]) -> None:
    """Kill the last replica at this place of the loop, once: a file records that it was done."""
    replica = sg.current_replica()
    if now in kills.get(where, ()) and replica.index and replica.index == replica.count - 1:
        mark = Path(kills["folder"]) / f"{where} {now}"  # type: ignore[arg-type]
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def loop(
    on: Any, kills: dict[str, Any], accumulate: int = 1, nap: float = 0.0, resume: Any = None
) -> dict[str, Any]:
    """A user's loop with a scheduler, a validation, and places where replicas are killed."""
    drawn = float(torch.rand(()))
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(*rows(), torch.arange(ROWS)), BATCH, shuffle=True)
    loader: Any
    model, optimizer, loader = on.prepare(model, optimizer, data, resume=resume)
    die("prepare", (-1, -1), kills)
    test = on.prepare(DataLoader(TensorDataset(*rows()), 50))
    steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    losses: dict[Any, float] = {"drawn": drawn if on.is_chief else 0.0}
    seen: list[list[int]] = []
    loader.remember(steps=steps, losses=losses, seen=seen)
    if nap:
        (Path(kills["folder"]) / "begun").touch()
    for epoch in loader.epochs(EPOCHS):
        for i, (x, y, ids) in enumerate(loader, loader.seen):
            now = (epoch, i)
            die("begin", now, kills)
            loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            die("backward", now, kills)
            if (i + 1) % accumulate == 0 or i + 1 == STEPS:
                optimizer.step()
                optimizer.zero_grad()
                die("step", now, kills)
                steps.step()
            losses[now] = on.mean(loss.detach())
            seen.append(on.gather(ids[: sg.current_replica().share.examples]).tolist())
            time.sleep(nap)
        right = total = 0.0
        with torch.no_grad():
            for x, y in test:
                right += float((model(x).argmax(1) == y).sum())
        die("test", (epoch, -1), kills)
        total = float(on.reduce("sum", torch.tensor(right)))
        losses[epoch, -1] = total / ROWS
    die("end", (-1, -1), kills)
    on.reduce("sum", torch.tensor(1.0))
    weights = [p.detach().clone() for p in model.parameters()]
    state = [v for s in optimizer.state.values() for v in s.values()]
    found = (weights, losses, seen, steps.get_last_lr(), state)
    return dict(zip(NAMES, found, strict=True))


def run(
    strategy: Any, folder: Path, kills: dict[str, Any] | None = None, **options: Any
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(5)
    found: list[dict[str, Any]] = strategy.run(
        _with_options, strategy, {**(kills or {}), "folder": str(folder)}, options
    )
    return found


def _with_options(on: Any, kills: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return loop(on, kills, **options)


def same(found: list[dict[str, Any]], expected: dict[str, Any], count: int) -> None:
    assert len(found) == count
    for each in found:
        for name in ("weights", "state"):
            for mine, theirs in zip(each[name], expected[name], strict=True):
                assert torch.allclose(mine, theirs, rtol=0, atol=1e-13), name
        if each is not found[0]:
            each["losses"]["drawn"] = expected["losses"]["drawn"]  # the chief's counts
        assert each["losses"].keys() == expected["losses"].keys()
        assert each["losses"] == pytest.approx(expected["losses"], abs=1e-12)
        assert each["rate"] == expected["rate"]
        assert each["seen"] == expected["seen"], "each row once, in the order of one device"
        counts = Counter(i for batch in each["seen"] for i in batch)
        assert set(counts.values()) == {EPOCHS} and len(counts) == ROWS


KILLS: dict[str, dict[str, Any]] = {
    "outside of steps": {
        "prepare": [(-1, -1)],
        "begin": [(0, 0)],
        "test": [(0, -1), (2, -1)],
    },
    "in steps": {"begin": [(0, 4), (1, 0)], "backward": [(1, 5), (2, STEPS - 1)]},
    "after the update": {"step": [(0, 0), (1, 3), (2, STEPS - 1)]},
    "at the end": {"end": [(-1, -1)]},
}


@pytest.mark.parametrize(
    ("case", "kind", "accumulate"),
    [
        ("outside of steps", None, 1),
        ("in steps", None, 1),
        ("after the update", None, 1),
        ("in steps", None, 3),
        ("at the end", None, 1),
        ("in steps", "ring", 1),
        pytest.param("after the update", None, 3, marks=pytest.mark.slow),
    ],
)
def test_kills_change_nothing(tmp_path: Path, case: str, kind: str | None, accumulate: int) -> None:
    kills, options = KILLS[case], {"accumulate": accumulate}
    if case == "after the update" and accumulate == 3:
        kills = {"step": [(0, 2), (2, STEPS - 1)]}
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic(kind)) as several:
        (expected,) = run(one, tmp_path / "one", resume=tmp_path / "checkpoints", **options)
        found = run(several, tmp_path / "several", kills, **options)
    done = {path.name for path in (tmp_path / "several").iterdir()}
    assert done == {f"{where} {now}" for where, nows in kills.items() for now in nows}
    same(found, expected, 3)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kills_at_any_moment(tmp_path: Path, seed: int) -> None:
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic()) as several:
        (expected,) = run(one, tmp_path / "one", resume=tmp_path / "checkpoints")
        begun = (tmp_path / "several" / "begun").exists  # before, nobody can begin again
        with killing(several, seed, 3, begun):
            found = run(several, tmp_path / "several", nap=0.02)
    same(found, expected, 3)


def test_checkpoints_besides(tmp_path: Path) -> None:
    """Replicas are killed, then all processes; the checkpoint equals one device's."""
    kills = {"begin": [(0, 5)], "step": [(1, 4)]}
    plan = sg.Checkpoints(tmp_path / "run", every=4, keep=99)
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic()) as several:
        (expected,) = run(one, tmp_path / "one", resume=tmp_path / "checkpoints")
        same(run(several, tmp_path / "several", kills, resume=plan), expected, 3)
        made = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
        assert [int(name.rpartition("-")[2]) for name in made] == [4, 8, 12, 16, 20, 24, 28, 30]
        for name in made[5:]:
            shutil.rmtree(tmp_path / "run" / name)
        same(run(several, tmp_path / "again", resume=plan), expected, 3)


def test_sentences() -> None:
    """Loops that cannot be restarted are refused before they train."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    data = DataLoader(TensorDataset(*rows()), BATCH)

    def without_loader(on: Any) -> None:
        on.prepare(model, optimizer)

    def again(on: Any) -> None:
        on.prepare(model, optimizer, data)
        on.prepare(model, optimizer, data)

    def two_models(on: Any) -> None:
        on.prepare(model, optimizer, data)
        other = net()
        on.prepare(other, torch.optim.Adam(other.parameters()), data)

    def without_epochs(on: Any) -> None:
        next(iter(on.prepare(model, optimizer, data).loader))

    def forgets(on: Any) -> None:
        loader: Any = on.prepare(model, optimizer, data).loader
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        next(loader.epochs(1))

    cases = {
        without_loader: "the DataLoader that is trained on",
        again: "this model is prepared already",
        two_models: "prepares one model",
        without_epochs: r"for epoch in loader\.epochs",
        forgets: r"loader\.remember\(schedule",
    }
    with closing(elastic(count=2)) as strategy:
        for function, words in cases.items():
            with pytest.raises(sg.UsageError, match=words):
                strategy.run(function, strategy)


def test_functions_without_a_loop_are_not_begun_again() -> None:
    """No replica knows what such a function has done before."""
    with closing(elastic(count=2)) as strategy, pytest.raises(ReplicaLost):
        strategy.run(_dies)


def _dies() -> None:
    if sg.current_replica().index:
        os.kill(os.getpid(), signal.SIGKILL)
    sg.current_replica().barrier()


# --- workers of a cluster -----------------------------------------------------------------------

WORKER = """
torch.set_default_dtype(torch.float64)
strategy = sg.MultiWorkerMirroredStrategy({kind!r}, elastic=True, patience=sg.Patience(arrive=20))
from tests.strategies.test_elastic_loops import talking
(found,) = strategy.run(talking, strategy, {epochs})
for name, value in found.items():
    print(name, "=", json.dumps(value), flush=True)
"""


def talking(on: Any, epochs: int, nap: float = 0.02) -> dict[str, Any]:
    """A loop that prints its progress."""
    torch.manual_seed(3)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(*rows(), torch.arange(ROWS)), BATCH, shuffle=True)
    loader: Any
    model, optimizer, loader = on.prepare(model, optimizer, data)
    seen: list[list[int]] = []
    loader.remember(seen=seen)
    for _ in loader.epochs(epochs):
        for x, y, ids in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(on.gather(ids[: sg.current_replica().share.examples]).tolist())
            on.print("batch", len(seen), on.num_replicas_in_sync, flush=True)
            time.sleep(nap)
    return {"weights": [p.tolist() for p in model.parameters()], "seen": seen}


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


def test_workers_leave_and_join(scripts: Nursery, tmp_path: Path) -> None:
    epochs = 30
    cluster = Cluster(scripts, tmp_path, 3)
    source = WORKER.format(kind=None, epochs=epochs)
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
    with closing(sg.MirroredStrategy(["cpu:0"], elastic=True)) as one:
        (expected,) = one.run(talking, one, epochs, 0.0)
    for found in (workers[0], again):
        weights: Any = found.noted("weights")
        for mine, theirs in zip(weights, expected["weights"], strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=1e-12)
        assert found.noted("seen") == expected["seen"]


def test_a_loop_outside_of_a_function_is_refused(scripts: Nursery, tmp_path: Path) -> None:
    cluster = Cluster(scripts, tmp_path, 2)
    source = WORKER.format(kind=None, epochs=1).replace(
        "(found,) = strategy.run(talking, strategy, 1)", "found = talking(strategy, 1)"
    )
    for worker in cluster.all(source):
        assert worker.ends(30) == 1
        assert "call strategy.run(train)" in worker.err, worker
