"""A cluster that a process starts by itself."""

from __future__ import annotations

import logging
import select
from dataclasses import dataclass
from functools import partial
from operator import index

from stratagem.arguments import by_name
from stratagem.cluster.environment import cores
from stratagem.cluster.failure import failed
from stratagem.errors import ReplicaLost, UsageError
from stratagem.replicas.pool import Pool
from stratagem.servers.local_workers import patiently
from stratagem.servers.shard_lines import Address
from stratagem.servers.task_main import serve
from stratagem.training.agreement import Patience

log = logging.getLogger("stratagem")

_ELSEWHERE = {
    "servers": "it is ps",
    "num_ps": "it is ps",
    "num_workers": "it is workers",
    "worker": "it is workers",
    "evaluator": "only a cluster in the environment has one: "
    "stratagem run --workers 2 --ps 1 --evaluator train.py",
    "devices": "devices are the strategy's: sg.ParameterServerStrategy(cluster, devices=[...])",
}


@dataclass(frozen=True, init=False)
class LocalCluster:
    """A cluster on this machine: this process is its first worker and starts the rest."""

    workers: int = 2
    ps: int = 1

    @partial(by_name, elsewhere=_ELSEWHERE)
    def __init__(self, workers: int = 2, ps: int = 1) -> None:
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "ps", ps)
        try:
            enough = index(workers) > 0 and index(ps) > 0
        except TypeError:
            enough = False
        if not enough:
            raise UsageError(
                f"LocalCluster(workers={workers!r}, ps={ps!r}): both are whole numbers, at least "
                "one of each; LocalCluster(workers=4, ps=2), for example."
            )


class LocalServers:
    """One child process for each server."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []

    def start(self, address: Address, patience: Patience, device: str) -> None:
        self._told = address, patience, device, cores() // len(address.servers)
        for i in range(len(address.servers)):
            self.pools.append(Pool([f"ps {i}"]))
            self.pools[i].submit(serve, [(i, *self._told)], patiently)

    def look(self) -> None:
        """Raise if a server ended before it came up."""
        for i, pool in enumerate(self.pools):
            one = pool.followers[0]
            if select.select([one.control], [], [], 0)[0]:
                answer = one.answer(0.0)
                if answer is not None and answer.failed:
                    raise failed(f"ps {i}", answer.text) from answer.error
                raise ReplicaLost(
                    f"ps {i} has ended while it started; its output stands above.", f"ps {i}"
                )

    def tend(self) -> None:
        """Start a dead server again, but the first: other servers send it its shards."""
        for i, pool in enumerate(self.pools):
            one = pool.followers[0]
            ended = i > 0 and bool(select.select([one.control], [], [], 0)[0])
            if ended and one.answer(0.0) is None and pool.orphaned() is None:
                log.warning("ps %d has ended; another takes its place", i)
                self._start_again(i)

    def revive(self) -> None:
        """Start every server again that does not serve any more."""
        for i, pool in enumerate(self.pools):
            one = pool.followers[0]
            if select.select([one.control], [], [], 0)[0]:
                if (orphaned := pool.orphaned()) is not None:
                    raise orphaned
                log.warning("ps %d has ended; another takes its place", i)
                self._start_again(i)

    def _start_again(self, i: int) -> None:
        self.pools[i].end()
        self.pools[i] = Pool([f"ps {i}"])
        self.pools[i].submit(serve, [(i, *self._told)], patiently)

    def end(self) -> None:
        for pool in self.pools:
            pool.end()
        self.pools = []
