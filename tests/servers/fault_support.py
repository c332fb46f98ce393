"""Faults for local clusters, and a model whose weights count how often each row was applied."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.rules.stats import Stats
from stratagem.servers.worker_group import WorkerGroup

ROWS = 480
BATCH = 24


class Counter(nn.Module):
    """One weight for each row; every time a row is trained on, its weight falls by one."""

    def __init__(self, rows: int = ROWS, pause: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 2))
        self.pause = pause

    def forward(self, rows: Tensor) -> Tensor:
        time.sleep(self.pause)
        return self.weight[rows].sum(1)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def by_one(params: Any) -> torch.optim.Optimizer:
    """SGD whose step lowers by one the weight of each row in a batch of BATCH rows."""
    return torch.optim.SGD(params, lr=float(BATCH))


def count(
    strategy: sg.Strategy,
    epochs: int = 2,
    pause: float = 0.0,
    loss: Callable[[Tensor, Tensor], Tensor] = mean,
    clip_norm: float | None = None,
    **options: Any,
) -> Tensor:
    """Train, and return the number of times each row was applied."""
    rows = torch.arange(ROWS)
    with strategy.scope():
        model = sg.Model(Counter(pause=pause))
        model.compile(optimizer=by_one, loss=loss, clip_norm=clip_norm)
    model.fit(rows, torch.zeros(ROWS), batch_size=BATCH, epochs=epochs, verbose=0, **options)
    return -model.module.weight.detach()


def local(workers: int = 3, ps: int = 2, **options: Any) -> sg.ParameterServerStrategy:
    """Make a local cluster whose servers all hold rows of the counter."""
    options.setdefault("partitioner", sg.FixedShards(ps))
    return sg.ParameterServerStrategy(sg.LocalCluster(workers=workers, ps=ps), **options)


def worker_group_of(strategy: sg.Strategy) -> WorkerGroup:
    assert isinstance(strategy.replica_group, WorkerGroup)
    return strategy.replica_group


def worker_pids(strategy: sg.Strategy) -> list[int]:
    """Return the pids of the current workers but the first, which is this process."""
    children = worker_group_of(strategy)._children
    return [] if children is None else [child.pool.pids[0] for child in children.members]


def ps_pids(strategy: sg.Strategy) -> list[int]:
    return worker_group_of(strategy).server_pids


def balanced(stats: Stats) -> bool:
    """Whether received = applied + dropped + buffered, in total and for every worker."""
    lines = [vars(stats), *stats.by_worker.values()]
    return all(
        line["received"] == line["applied"] + line["dropped"] + line["buffered"] for line in lines
    ) and stats.received == sum(line["received"] for line in stats.by_worker.values())


def shoot(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in another thread; set its event when the block ends."""
    stop = threading.Event()
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work(stop)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if problems:
        raise problems[0]


class Killer:
    """Kill a working child now and then, at most `limit` times."""

    def __init__(
        self, strategy: sg.Strategy, seed: int, least: float, most: float, limit: int = 10**6
    ) -> None:
        self.strategy, self.kills, self.limit = strategy, 0, limit
        self._dice, self._between = random.Random(seed), (least, most)

    def __call__(self, stop: threading.Event) -> None:
        while self.kills < self.limit and not stop.wait(self._dice.uniform(*self._between)):
            pids = worker_pids(self.strategy)
            if pids:
                self.kills += shoot(self._dice.choice(pids))
