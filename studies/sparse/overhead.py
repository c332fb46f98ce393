"""What messages between a worker and its servers cost processors, measured on this machine.

A model that computes nothing is trained on one and on two real servers over sockets; the processor
clocks of the worker and of the servers say what a message, a byte, and the rest of a step take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem.plan.machine import one_thread
from stratagem.plan.simulation.scenario import Overhead
from stratagem.servers.connections import SHARED_MEMORY
from stratagem.servers.local_cluster import LocalCluster
from stratagem.servers.worker_group import WorkerGroup
from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import partition
from stratagem.state.store import Store
from stratagem.strategies.parameter_server import ParameterServerStrategy

_SMALL, _LARGE = 16, 1 << 20  # parameters
_WARM = 20  # steps before the clocks are read

#: processor seconds: the worker's, and those of each server
Clocks = npt.NDArray[np.float64]


def measure_overhead(steps: int = 300) -> Overhead:
    """What a message costs, a byte, and a step; with fewer steps faster and rougher."""
    with one_thread():
        with _over_sockets():
            one, two = (_served(_SMALL, servers, steps) for servers in (1, 2))
            large = _served(_LARGE, 1, max(10, steps // 5)) - _beside(_LARGE)
        idle = _beside(_SMALL)
    # the second server has two messages, too, and hears an order, which is half of one
    message = np.array([(two[0] - one[0]) / 2, (two[2] - idle[1]) / 2.5])
    byte = (large - one + idle) / (2 * 4 * (_LARGE - _SMALL))  # there and back
    step = one - idle - message
    return Overhead(*np.maximum(0.0, np.concatenate([message, byte, step])).tolist())


def _served(count: int, servers: int, steps: int) -> Clocks:
    """A step of one asynchronous worker."""
    strategy = ParameterServerStrategy(LocalCluster(workers=1, ps=servers))
    try:
        found: list[Clocks] = strategy.run(_train, strategy, count, steps)
    finally:
        strategy.close()
    return found[0]


def _train(strategy: ParameterServerStrategy, count: int, steps: int) -> Clocks:
    assert isinstance(strategy.replica_group, WorkerGroup)
    servers = strategy.replica_group.server_pids
    module = _Idle(count)
    rows = TensorDataset(torch.zeros(_WARM + steps, 1))
    model, optimizer, loader = strategy.prepare(
        module, torch.optim.SGD(module.parameters(), 1e-3), DataLoader(rows, batch_size=1)
    )
    begun = _clocks(servers)
    for number, (x,) in enumerate(loader):
        if number == _WARM:
            begun = _clocks(servers)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return (_clocks(servers) - begun) / steps


def _beside(count: int) -> Clocks:
    """Measure what of that is no message: the worker's computation, the server's update."""
    module = _Idle(count)
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    params = list(module.parameters())
    shapes = [tuple(p.shape) for p in params]
    store = Store(partition(shapes, 4, 1), shapes, torch.float32, describe(optimizer, params))
    gradient = torch.zeros(store.count)

    def update() -> None:
        store.add(gradient, 1.0, [True, True])
        store.apply(1.0)

    x = torch.zeros(1, 1)
    return np.array([_typical(lambda: module(x).sum().backward()), _typical(update)])


def _typical(work: Callable[[], Any]) -> float:
    """Return the processor seconds of some work, after a warm-up."""
    for _ in range(3):
        work()
    begun = time.process_time()
    for _ in range(20):
        work()
    return (time.process_time() - begun) / 20


class _Idle(nn.Module):
    """Parameters whose gradient takes no computing to speak of."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.halves = nn.ParameterList(torch.zeros(count // 2, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([half * x[:1] for half in self.halves])


def _clocks(servers: Sequence[int]) -> Clocks:
    """Processor seconds of this process and of those so far."""
    # the clocks that clock_getcpuclockid(3) names
    return np.array([time.process_time(), *(time.clock_gettime(~pid << 3 | 2) for pid in servers)])


@contextmanager
def _over_sockets() -> Iterator[None]:
    """As between hosts: nothing is passed in memory."""
    before = os.environ.get(SHARED_MEMORY)
    os.environ[SHARED_MEMORY] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SHARED_MEMORY]
        else:
            os.environ[SHARED_MEMORY] = before
