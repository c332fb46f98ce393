"""Servers without a backup are killed: the job goes back to its last checkpoint.

Only the servers' processes are restarted. The result is that of one device without faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.cluster.failure import server_lost
from stratagem.errors import ReplicaLost
from stratagem.servers import task_main
from stratagem.servers.server import Server
from tests.clock import unless_late
from tests.servers.fault_support import count, local, ps_pids, shoot, worker_pids
from tests.servers.test_shard import plan_with
from tests.strategies.test_elastic import net, rows

pytestmark = pytest.mark.timeout(120)

EPOCHS, BATCH = 4, 32


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Killer(sg.callbacks.Callback):
    """Kills each server after some batches of this process."""

    def __init__(self, strategy: Any, kills: dict[int, int]) -> None:
        self._about = (strategy, kills, [0], [])  # not plain: it is no part of a checkpoint
        self.count = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        strategy, kills, seen, killed = self._about
        self.count += 1
        seen[0] += 1
        if seen[0] in kills:
            killed.append(ps_pids(strategy)[kills[seen[0]]])
            shoot(killed[-1])

    @property
    def kills(self) -> list[int]:
        return self._about[3]


def train(strategy: Any, kills: dict[int, int], **options: Any) -> tuple[Any, dict[str, Any], Any]:
    torch.manual_seed(5)
    x, y = rows()
    more = options.pop("more", [])
    given = options.pop("data", lambda x, y: (x, y))(x, y)
    with strategy.scope():
        model = sg.Model(net())
        model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"])
    if isinstance(given, tuple):
        options["batch_size"] = BATCH
    killer = Killer(strategy, kills)
    history = model.fit(
        *(given if isinstance(given, tuple) else (given,)),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[killer, *more],
        **options,
    ).history
    return model.module, {k: history[k] for k in ("loss", "accuracy")}, killer


def alone(**options: Any) -> tuple[Any, dict[str, Any], Any]:
    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        return train(one, {}, **options)


def check(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
    for name, values in expected[1].items():
        assert found[1][name] == pytest.approx(values, abs=1e-9), name
    assert found[2].count == expected[2].count, "what callbacks remember goes back, too"


@pytest.mark.parametrize("shared", ["1", "0"])
def test_one_server_and_then_the_first_are_started_again(
    shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    with closing(local(workers=2, ps=3, updates=sg.Synchronous())) as strategy:
        strategy.run(int)
        servers, workers = ps_pids(strategy), worker_pids(strategy)
        plan = sg.Checkpoints(tmp_path, every=4)
        found = train(strategy, {3: 1, 14: 0}, checkpoint=plan)
        assert len(found[2].kills) == 2
        assert worker_pids(strategy) == workers, "workers stay what they are"
        now = ps_pids(strategy)
        assert now[2] == servers[2] and now[0] != servers[0] and now[1] != servers[1]
    check(found, alone())


@pytest.mark.parametrize(("resumes", "turns"), [(True, 3), (False, 1)])
def test_another_server_may_be_lost_while_the_first_is_awaited(resumes: bool, turns: int) -> None:
    """It restarts, although the chief has not sent a plan yet."""
    made: list[Server] = []
    some = plan_with(torch.optim.SGD, sg.Synchronous())

    class Falling(Server):
        def serve(self) -> None:
            made.append(self)
            if len(made) == 1:
                self.shard.plan = replace(some, resumes=resumes)
            if len(made) < 3:
                raise server_lost(f"ps {len(made)}")

    with contextlib.suppress(ReplicaLost):
        task_main.serve_to_the_end(lambda: Falling(0, ["127.0.0.1:1"], b""))
    assert len(made) == turns


@pytest.mark.slow
def test_shuffled_rows_of_a_loader_come_once_an_epoch(tmp_path: Path) -> None:
    def loader(x: Any, y: Any) -> Any:
        return DataLoader(TensorDataset(x, y), BATCH, shuffle=True)

    with closing(local(workers=2, ps=2, updates=sg.Synchronous())) as strategy:
        plan = sg.Checkpoints(tmp_path, every=3)
        found = train(strategy, {6: 1, 15: 1}, checkpoint=plan, data=loader)
        assert len(found[2].kills) == 2
    check(found, alone(data=loader))


def test_asynchronous_workers_count_every_row_once_an_epoch(tmp_path: Path) -> None:
    """The final weights show it; updates after the checkpoint are undone."""
    with closing(local(workers=2, ps=2)) as strategy:
        killer = Killer(strategy, {8: 1})
        counted = count(strategy, 2, 0.01, callbacks=[killer], checkpoint=str(tmp_path))
        unless_late(killer.kills, "the other worker did almost all of it")
        assert len(killer.kills) == 1
    assert torch.equal(counted, torch.full_like(counted, 2.0))


def test_what_was_saved_by_another_training_is_not_gone_back_to(tmp_path: Path) -> None:
    """A server that dies before this one has saved anything ends the job."""

    class Early(sg.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            shoot(ps_pids(strategy)[1])

    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        train(one, {}, checkpoint=str(tmp_path))
    with closing(local(workers=1, ps=2, updates=sg.Synchronous())) as strategy:
        strategy.run(int)
        with pytest.raises(ReplicaLost, match="ps 1 is gone"):
            train(strategy, {}, checkpoint=str(tmp_path), more=[Early()])


def test_a_server_that_dies_again_and_again_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.frontends.model_calls.IN_VAIN", 2)
    with closing(local(workers=1, ps=2, updates=sg.Synchronous())) as strategy:
        kills = dict.fromkeys(range(2, 40), 1)
        with pytest.raises(ReplicaLost, match="ps 1 is gone"):
            train(strategy, kills, checkpoint=str(tmp_path))
