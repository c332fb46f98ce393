"""Workers are killed, stopped and continued at random, from a seed: no gradient is lost.

STRATAGEM_CHAOS_SECONDS=60 makes it a minute, STRATAGEM_CHAOS_SEED another run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import stratagem as sg
from tests.clock import unless_late
from tests.replicas.scripts import Nursery, Script, nursery, runs, wait_for
from tests.servers.fault_support import (
    ROWS,
    balanced,
    beside,
    count,
    local,
    ps_pids,
    shoot,
    worker_pids,
)
from tests.servers.test_clients import Cluster

SECONDS = float(os.environ.get("STRATAGEM_CHAOS_SECONDS", "4"))
SEED = int(os.environ.get("STRATAGEM_CHAOS_SEED", "1"))

pytestmark = pytest.mark.timeout(120 + 4 * SECONDS)

RULES = [
    sg.Synchronous(),
    sg.Synchronous(spares=1),
    sg.Asynchronous(),
    sg.Asynchronous(bound=2),
    sg.Asynchronous(staleness=[sg.Drop(older_than=3)]),
]


class Chaos:
    """Signals processes at random; `victims` returns the present process ids."""

    def __init__(self, victims: Callable[[], list[int]], seed: int, longest: float) -> None:
        self._victims, self._dice, self._longest = victims, random.Random(seed), longest
        self.kills = self.stops = 0

    def __call__(self, stop: threading.Event) -> None:
        stopped: list[tuple[float, int]] = []
        while not stop.wait(self._dice.uniform(0.02, 0.6)):
            now = time.monotonic()
            for due, pid in stopped:
                if due <= now:
                    shoot(pid, signal.SIGCONT)
            stopped = [(due, pid) for due, pid in stopped if due > now]
            pids = self._victims()
            if not pids:
                continue
            pid = self._dice.choice(pids)
            if self._dice.random() < 0.5:
                self.kills += shoot(pid)
            else:
                self.stops += shoot(pid, signal.SIGSTOP)
                stopped.append((now + self._dice.uniform(0.0, self._longest), pid))
        for _, pid in stopped:
            shoot(pid, signal.SIGCONT)


@pytest.mark.chaos
def test_chaos_in_a_local_cluster() -> None:
    """One training after another, with each rule in turn, while workers come and go."""
    until = time.monotonic() + SECONDS
    kills = stops = trainings = 0
    while time.monotonic() < until:
        updates = RULES[(SEED + trainings) % len(RULES)]
        strategy = local(workers=4, updates=updates, patience=sg.Patience(answer=5))
        chaos = Chaos(lambda: worker_pids(strategy), SEED + trainings, 1.0)  # noqa: B023
        try:
            with beside(chaos):
                for _ in range(3):
                    if time.monotonic() < until:
                        trainings += 1
                        _train(strategy)
            servers = ps_pids(strategy)
        finally:
            strategy.close()
        assert not any(runs(pid) for pid in servers)
        kills, stops = kills + chaos.kills, stops + chaos.stops
    print(f"{trainings} trainings, {kills} kills, {stops} stops in {SECONDS:.0f} s")
    unless_late(kills + stops >= SECONDS / 6, (kills, stops))


def _train(strategy: sg.ParameterServerStrategy) -> None:
    counts = count(strategy, epochs=3, pause=0.005)
    stats = strategy.stats()
    assert balanced(stats) and stats.buffered == 0 and stats.lost == 0, stats
    assert stats.updates == 3 * 20, stats
    assert torch.allclose(counts, torch.full((ROWS, 2), 3.0), atol=1e-3), (counts.unique(), stats)


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


@pytest.mark.slow
def test_chaos_in_a_cluster_of_processes(scripts: Nursery, tmp_path: Path) -> None:
    """The test restarts killed processes until the chief is done."""
    cluster = Cluster(scripts, tmp_path, workers=3)
    seconds = max(4.0, SECONDS / 3)
    source = f"""
until = time.monotonic() + {seconds}
strategy = made(free, answer=5)
for round in range(100000):
    counts = count(strategy, 2, pause=0.01)
    if me == ("worker", 0):
        report(strategy, counts, 2)
        if time.monotonic() > until:
            break
"""
    chief = cluster.start("worker 0", source)
    servers = [cluster.start(task, source) for task in ("ps 0", "ps 1")]
    others: dict[str, Script] = {}
    killed = 0

    def restart() -> None:
        nonlocal killed
        for task in ("worker 1", "worker 2"):
            before = others.get(task)
            if before is None or before.status is not None:
                killed += before is not None
                others[task] = cluster.start(task, source)

    def living() -> list[int]:
        return [script.pid for script in others.values() if script.status is None]

    chaos = Chaos(living, SEED, 1.0)
    restart()
    with beside(chaos):
        until = time.monotonic() + seconds + 40
        while chief.status is None:
            unless_late(time.monotonic() < until, (chief, others))
            time.sleep(0.1)
            if "balanced" in chief.out:
                restart()
    assert chief.status == 0, (chief, others)
    lines = [line for line in chief.out.splitlines() if " = " in line]
    assert lines and not [line for line in lines if line.endswith("= false")], chief
    wait_for(lambda: all(s.status == 0 for s in servers), what=f"for {servers}")
    unless_late(killed > 0, "nobody was killed, by chance")
