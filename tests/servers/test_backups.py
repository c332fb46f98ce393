"""Servers that hold each other's shards are killed: other servers take over until they are back.

The weights are those of a training without faults, so no update was lost or made twice.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.servers.client import Assignment
from stratagem.servers.training_plan import holders_of
from tests.clock import PATIENCE, unless_late, wait_for
from tests.servers.fault_support import (
    balanced,
    beside,
    count,
    local,
    ps_pids,
    shoot,
    worker_group_of,
)
from tests.servers.server_threads import ThreadedJob
from tests.support import by_hand, data, distance, mlp

pytestmark = pytest.mark.timeout(120)

TAKEN_OVER = 2.0  # seconds from the kill to the next update

RULES = {
    "in step": sg.Synchronous(),
    "with a spare": sg.Synchronous(spares=1),
    "free": sg.Asynchronous(staleness=[sg.ScaleDown()]),
}


@pytest.fixture
def made() -> Iterator[Callable[..., sg.ParameterServerStrategy]]:
    """Make local clusters that end with the test."""
    several: list[sg.ParameterServerStrategy] = []

    def make(**options: Any) -> sg.ParameterServerStrategy:
        several.append(local(backups=1, **options))
        return several[-1]

    yield make
    for strategy in several:
        strategy.close()


class ServerKiller:
    """Kills a server (not the first) during updates, and again when it is back."""

    def __init__(self, strategy: sg.ParameterServerStrategy, seed: int, limit: int = 100) -> None:
        self._strategy, self._dice, self.limit = strategy, random.Random(seed), limit
        self.kills = 0
        #: seconds from a kill to the next update
        self.gaps: list[float] = []

    def __call__(self, stop: threading.Event) -> None:
        while self.kills < self.limit and not stop.is_set():
            before = self._updates()
            if before and self._whole() and not stop.wait(self._dice.uniform(0.0, 0.3)):
                before = self._updates()
                self.kills += shoot(self._dice.choice(ps_pids(self._strategy)[1:]))
                killed = time.monotonic()
                while self._updates() <= before + 1 and not stop.wait(0.005):
                    continue
                if not stop.is_set():
                    self.gaps.append(time.monotonic() - killed)
            stop.wait(0.02)

    def _updates(self) -> int:
        worker = worker_group_of(self._strategy).worker
        found = None if worker is None else worker.stats()
        return 0 if found is None else found.updates

    def _whole(self) -> bool:
        """Return whether every shard has two holders, as far as workers know."""
        worker = worker_group_of(self._strategy).worker
        assert worker is not None
        return all(len(worker.lines.of(i)) == 2 for i in range(1, len(worker.lines)))


# --- the same everywhere --------------------------------------------------------------------------


def test_a_shard_lies_on_its_own_server_and_the_next_ones() -> None:
    assert [holders_of(i, 3, 1) for i in range(3)] == [[0], [1, 2], [2, 0]]
    assert [holders_of(i, 3, 0) for i in range(3)] == [[0], [1], [2]]
    assert holders_of(1, 2, 1) == [1, 0]


@pytest.mark.parametrize("shared", ["1", "0"])
def test_all_holders_have_the_same_bits(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with scaled gradients, which no holder may scale in place."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    job = ThreadedJob(3, 2)
    nets = [nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3))) for _ in "ab"]
    rule = {"updates": RULES["free"], "backups": 1}
    sessions = [
        job.begin(net, torch.optim.Adam(net.parameters(), lr=0.01), worker=i, **rule)
        for i, net in enumerate(nets)
    ]
    sessions[0].worker.deal(1, 0, [(10, 1)], True)
    for _ in range(5):
        both = [session.worker.next() for session in sessions]
        for session, net, work in zip(sessions, nets, both, strict=True):
            assert isinstance(work, Assignment)
            net(torch.randn(8, 128)).pow(2).mean().backward()
            session.worker.push(work.ticket, 1.0, 1.0, 8)
            session.forget_gradients()
    coordinator = job.servers[0].coordinator
    assert coordinator is not None
    for shard, holders in ((1, (1, 2)), (2, (2, 0))):
        found = [job.servers[server].shards.of(shard) for server in holders]
        for each in found:
            each.wait_until(lambda: each.done >= coordinator.commands.given)  # noqa: B023
        assert found[0].store.version == found[1].store.version == 10
        one, other = (each.store.snapshot() for each in found)
        assert torch.equal(one.values, other.values)
        for mine, theirs in zip(one.states, other.states, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq"))
    for session in sessions:
        session.end()
    job.close()


def test_a_gradient_lies_there_until_all_holders_have_read_it() -> None:
    """The worker gets no ticket before that, because it would overwrite the gradient."""
    job = ThreadedJob(2)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    session = job.begin(net, torch.optim.SGD(net.parameters(), lr=0.1), backups=1)
    worker = session.worker
    worker.deal(1, 0, [(2, 1)], True)
    work = worker.next()
    assert isinstance(work, Assignment)
    net(torch.ones(1, 4)).sum().backward()
    came = threading.Event()
    backup = job.servers[0].shards.of(1)

    def go_on() -> None:
        worker.push(work.ticket, 1.0, 1.0, 1)
        worker.next()
        came.set()

    thread = threading.Thread(target=go_on)
    with backup.changed:  # it carries out no order now
        thread.start()
        assert not came.wait(0.5)
    thread.join(PATIENCE)
    assert came.is_set() and backup.done == 1
    session.end()
    job.close()


# --- killed servers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "seed"), [("1", 1), *(pytest.param("0", n, marks=pytest.mark.slow) for n in (2, 3))]
)
def test_servers_are_killed_at_any_moment(
    made: Any, shared: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of one device, and other servers take over within two seconds."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    x, y = data(120)
    x = x.double()
    start = mlp().double()

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    def slow(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return F.cross_entropy(output, target)

    epochs = 30
    alone = by_hand(start, adam, F.cross_entropy, x, y, batch=24, epochs=epochs)
    strategy = made(workers=2, ps=3, updates=sg.Synchronous())
    with strategy.scope():
        model = sg.Model(start)
        model.compile(optimizer=adam, loss=slow, clip_norm=1e9)
    killer = ServerKiller(strategy, seed, limit=3)
    with beside(killer):
        model.fit(x, y, batch_size=24, epochs=epochs, verbose=0, shuffle=False)
    assert distance(model.module, alone) < 1e-13
    stats = strategy.stats()
    assert balanced(stats) and stats.buffered == 0 and stats.updates == epochs * 5, stats
    # the training may have ended before the update that a gap ends with
    unless_late(killer.gaps and max(killer.gaps) < TAKEN_OVER, (killer.kills, killer.gaps))


@pytest.mark.parametrize(
    ("rule", "shared"),
    [
        ("free", "0"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("free", "1"), ("with a spare", "0"))
        ),
    ],
)
def test_no_update_is_lost_or_made_twice(
    made: Any, rule: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of every epoch counts once, while workers and servers are killed."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    updates = sg.Asynchronous() if rule == "free" else RULES[rule]
    strategy = made(workers=2, ps=2, updates=updates)
    killer = ServerKiller(strategy, seed=4, limit=2)
    with beside(killer):
        counts = count(strategy, epochs=12, pause=0.01)
    assert torch.allclose(counts, torch.full_like(counts, 12.0), atol=1e-3), counts.unique()
    stats = strategy.stats()
    assert balanced(stats) and stats.buffered == 0 and stats.updates == 12 * 20, stats
    unless_late(killer.kills >= 1, killer.kills)


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on(made: Any) -> None:
    x, y = data(96)
    start = mlp()
    alone = by_hand(
        start, lambda p: torch.optim.SGD(p, lr=0.1), F.cross_entropy, x, y, batch=24, epochs=40
    )
    strategy = made(workers=2, ps=2, updates=sg.Synchronous())

    def train(strategy: sg.Strategy, net: nn.Module) -> nn.Module:
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x, y), batch_size=24)
        net, sgd, loader = strategy.prepare(net, sgd, loader)
        for _ in range(40):
            for rows, target in loader:
                time.sleep(0.005)
                F.cross_entropy(net(rows), target).backward()
                sgd.step()
                sgd.zero_grad()
        return net

    killer = ServerKiller(strategy, seed=6, limit=2)
    with beside(killer):
        strategy.run(train, strategy, start)
    assert distance(start, alone) < 1e-6
    unless_late(killer.kills >= 1, killer.kills)


@pytest.mark.slow
def test_the_first_server_is_not_held_by_another(made: Any) -> None:
    strategy = made(workers=2, ps=2, updates=sg.Synchronous())

    def kill(stop: threading.Event) -> None:
        while not (worker_group_of(strategy).worker and strategy.stats().updates):
            stop.wait(0.02)
        shoot(ps_pids(strategy)[0])

    with beside(kill), pytest.raises(sg.ReplicaLost, match=r"ps 0 is gone.*checkpoint"):
        count(strategy, epochs=200, pause=0.01)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("backups", [-1, 2, 1.5])
def test_backups_are_other_servers(backups: Any) -> None:
    with pytest.raises(sg.UsageError, match="from 0 to the number of ps less one"):
        sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=2), backups=backups)


def test_policies_that_need_what_was_fetched_are_refused() -> None:
    rule = sg.Asynchronous(staleness=[sg.GapAware()])
    with pytest.raises(sg.UsageError, match="GapAware compares values"):
        sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=2), updates=rule, backups=1)


#: what the first worker does in its loss; the others, of other processes, have none
_between: list[Callable[[], None]] = []


def interrupted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    for each in _between:
        each()
    return output.mean()


def test_a_server_dies_and_comes_back_while_nobody_speaks_to_it(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With shared memory a worker may still be connected to the dead process."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1")
    strategy = made(workers=2, ps=3, updates=sg.Synchronous())
    steps = []

    def kill_and_wait() -> None:
        steps.append(1)
        if len(steps) in (3, 5):
            returns = caplog.text.count("ps 1 is back")
            assert shoot(ps_pids(strategy)[1])
            wait_for(lambda: caplog.text.count("ps 1 is back") > returns)

    monkeypatch.setattr(sys.modules[__name__], "_between", [kill_and_wait])
    counts = count(strategy, epochs=4, loss=interrupted)
    assert (counts == 4).all() and len(steps) > 5
    assert balanced(strategy.stats())
