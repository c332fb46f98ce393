"""Standbys take the places of replicas that die during a step; other replicas do not notice."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.cluster.membership import Failure, Member
from stratagem.errors import NotDistributable
from stratagem.replicas.pool import Follower
from stratagem.replicas.zygote import ZygoteProcess
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.standbys import Standbys
from stratagem.wire.collective_log import is_ready
from tests.clock import unless_late, wait_for

pytestmark = pytest.mark.timeout(120)

ROWS, BATCH, EPOCHS = 192, 48, 16


def deadly(folder: Path, pause: float) -> Any:
    """Return a slow loss that kills the replica whose name is in the folder.

    If the file has a number, the replica dies so many steps later.
    """

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(pause)
        replica = sg.current_replica()
        if replica.collective.live:  # a standby that rehearses draws nothing that counts
            drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
            with (folder / f"drawn {replica.count} {os.getpid()}").open("a") as file:
                file.write(f"{drawn}\n")
        name = folder / str(replica.index)
        if name.exists():
            left = int(name.read_text() or 0)
            if left == 0:
                name.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            name.write_text(str(left - 1))
        return nn.functional.cross_entropy(output, target)

    return loss


class Kills(sg.callbacks.Callback):
    """Makes each follower die during a step, once its standby is ready."""

    def __init__(self, strategy: Any, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder
        self.calls: list[int] = []
        self.killed: list[int] = []

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(batch)
        if self.strategy is None or len(self.killed) == 2:
            return
        group = self.strategy.replica_group
        rank = 1 + len(self.killed)
        one = group._standbys._waiting.get(rank)
        if one is not None and is_ready(one.member):
            self.killed.append(group._pool.followers[rank - 1].pid)
            (self.folder / str(rank)).touch()


class Counting(nn.Tanh):
    """Counts its calls, which standbys do not repeat."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + 0.01 * self.calls)


class Slowing(torch.optim.SGD):
    """Lowers its own learning rate at each step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.99


class Odd(torch.optim.SGD):
    """An optimizer with state that cannot be sent."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("seen", {1})


def train(
    strategy: Any,
    killed: bool,
    dtype: torch.dtype,
    folder: Path,
    middle: type[nn.Module] = nn.Tanh,
    optimizer: Any = torch.optim.Adam,
) -> Any:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=dice, dtype=dtype)
    y = torch.randint(0, 4, (ROWS,), generator=dice)
    torch.manual_seed(5)
    with strategy.scope(check=False):
        module = nn.Sequential(nn.Linear(8, 64), middle(), nn.Linear(64, 4)).to(dtype)
        model = sg.Model(module)
        loss = deadly(folder, 0.02 if killed else 0.0)
        model.compile(lambda p: optimizer(p, lr=1e-2), loss, metrics=["accuracy"])
    kills = Kills(strategy if killed else None, folder)
    rate = sg.callbacks.LearningRateScheduler(lambda epoch, now: now * 0.97)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[kills, rate]
    ).history
    state = [s[name] for s in model.optimizer.state.values() for name in sorted(s)]
    return [*module.parameters(), *state], history, kills


def note_falls(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Record the reasons for regroupings."""
    falls: list[BaseException] = []
    plain = ReplicaGroup._cause_of
    monkeypatch.setattr(
        ReplicaGroup, "_cause_of", lambda self, error: (falls.append(error), plain(self, error))[1]
    )
    return falls


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
def test_a_death_in_a_step(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With copies of the model (float64), and with slices of a shared one (float32).

    No two replicas draw the same random numbers, standbys included.
    """
    falls = note_falls(monkeypatch)
    devices = [f"cpu:{i}" for i in range(3)]
    with (
        closing(sg.MirroredStrategy(["cpu:0"])) as one,
        closing(sg.MirroredStrategy(devices, elastic=True)) as several,
    ):
        expected = train(one, False, dtype, tmp_path)
        found = train(several, True, dtype, tmp_path)
        unless_late(len(found[2].killed) == 2, "a standby was not ready before the end")
        assert not falls, "nobody came together anew"
        assert not set(found[2].killed) & set(several.replica_group._pool.pids)
        drawn = [json.loads(line) for each in tmp_path.glob("drawn 3 *") for line in each.open()]
        assert len(list(tmp_path.glob("drawn 3 *"))) == 5, "three, and two that took a place"
        assert all(len(set(of_one)) == len(drawn) for of_one in zip(*drawn, strict=True))
        # who took a place goes on with the next call
        again = train(several, False, dtype, tmp_path)
    limit = 1e-13 if dtype is torch.float64 else 1e-6
    for each in (found, again):
        for mine, theirs in zip(each[0], expected[0], strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=limit)
        for name in ("loss", "accuracy"):
            assert each[1][name] == pytest.approx(expected[1][name], abs=1e-5), name
        assert each[2].calls == expected[2].calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"middle": Counting}, {"optimizer": Slowing}, {"optimizer": Odd}]
)
def test_what_a_standby_is_not_told(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replicas regroup if steps write more than weights and state, and then have all of it."""

    class InAnEpoch(sg.callbacks.Callback):  # between batches nobody is told anything
        def __init__(self, strategy: Any, folder: Path) -> None:
            self.killed = strategy is not None
            self.file = folder / "1"

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if self.killed and epoch == EPOCHS - 3:
                self.file.write_text("2")

    monkeypatch.setattr(sys.modules[__name__], "Kills", InAnEpoch)
    found = []
    for count in (1, 2):
        devices = [f"cpu:{i}" for i in range(count)]
        loud = count == 2 and given.get("optimizer") is Odd  # and nobody waits
        said = pytest.raises(NotDistributable) if loud else nullcontext()
        with closing(sg.MirroredStrategy(devices, elastic=True)) as strategy, said:
            found.append(train(strategy, count == 2, torch.float64, tmp_path, **given))
    for mine, theirs in zip(found[-1][0], found[0][0], strict=True):
        assert mine is theirs or torch.allclose(mine, theirs, rtol=0, atol=1e-13)
    assert not (tmp_path / "1").exists(), "nobody has died"


@pytest.mark.slow
def test_two_die_and_one_has_no_standby(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All replicas regroup, without waiting for the standby that is taking the other's place."""
    monkeypatch.setattr("stratagem.cluster.star.LINGER", 40.0)
    falls, sent = note_falls(monkeypatch), list[int]()
    start, send = Standbys._start, Standbys._send_into_step

    def start_one(self: Any, rank: int, *given: Any) -> None:
        if rank == 1:
            start(self, rank, *given)

    def send_late(self: Any, rank: int, one: Follower, over: threading.Event) -> bool:
        taken = send(self, rank, one, over)
        sent.append(one.pid)
        os.kill(self._pool.followers[1].pid, signal.SIGKILL)
        assert taken and over.wait(20), "the others have heard of the second death"
        return taken

    monkeypatch.setattr(Standbys, "_start", start_one)
    monkeypatch.setattr(Standbys, "_send_into_step", send_late)
    devices = [f"cpu:{i}" for i in range(3)]
    with (
        closing(sg.MirroredStrategy(["cpu:0"])) as one,
        closing(sg.MirroredStrategy(devices, elastic=True)) as several,
    ):
        expected = train(one, False, torch.float64, tmp_path)
        found = train(several, True, torch.float64, tmp_path)
        assert len(sent) == len(falls) == 1
        wait_for(lambda: not Path(f"/proc/{sent[0]}").exists(), 10.0, "for the standby's end")
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-13)
    assert found[2].calls == expected[2].calls


def test_a_death_that_is_known_when_its_call_is_over_ends_no_standby_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr("stratagem.training.standbys._end", ended.extend)
    told: list[Failure] = []
    membership: Any = SimpleNamespace(give_up_on=told.append, stand_in=None)
    collective: Any = SimpleNamespace(log=None, position=(0, 0), turn_of=lambda rank: 0)
    placement: Any = SimpleNamespace(devices=["cpu:0", "cpu:1"], leader=0)
    pool: Any = SimpleNamespace(followers=[])
    standbys = Standbys(collective, placement, membership, pool, 1.0)
    earlier, later = (SimpleNamespace(name="replica 1", pid=pid) for pid in (1, 2))
    over, waiting, died = (
        standbys._over,
        {1: earlier},
        Failure(1, Member("one", "here"), "died", ""),
    )
    standbys.rest()
    next_call: Any = {1: later}
    standbys._over, standbys._waiting = threading.Event(), next_call
    standbys._take_place(died, earlier, waiting, over)
    wait_for(lambda: ended, what="for the standby's end")
    assert ended == [earlier] and standbys._waiting == {1: later} and told == [died]


SLOW_TO_IMPORT = """
import os
import time
import torch
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(0.5)
def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target)
"""


@pytest.mark.slow
def test_who_takes_a_place_has_imported_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also without standbys, no replica waits for imports of the user's modules, or for a fork."""
    imported = tmp_path / "imported"
    (tmp_path / "slow_to_import.py").write_text(SLOW_TO_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IMPORTED", str(imported))
    import slow_to_import  # type: ignore[import-not-found]

    before: list[set[str]] = []
    asked: list[list[str]] = []
    plain = ZygoteProcess._ask

    def ask(self: Any, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if asked and threading.current_thread() is threading.main_thread():
            asked[-1].append(f"end {len(request['end'])}" if "end" in request else "fork")
        return plain(self, request, fds)

    monkeypatch.setattr(ZygoteProcess, "_ask", ask)

    class KillsOne(sg.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            asked.append([])
            if not before:
                wait_for(lambda: len(imported.read_text().split()) == 5, what="for two spares")
                before.append(set(imported.read_text().split()))
                os.kill(strategy.replica_group._pool.pids[0], signal.SIGKILL)

    devices = [f"cpu:{i}" for i in range(3)]
    with closing(sg.MirroredStrategy(devices, "ring", elastic=True)) as strategy:
        with strategy.scope(check=False):
            model = sg.Model(nn.Linear(8, 4))
            model.compile("sgd", slow_to_import.loss)
        x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[KillsOne()])
        assert {str(pid) for pid in strategy.replica_group._pool.pids} <= before[0]
    assert asked[0] == [], "nobody is forked, and no end is waited for, that of the dead included"
