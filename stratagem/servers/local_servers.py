"""The servers of a local cluster: processes, started again where others hold their shards."""

from __future__ import annotations

import logging
import select

from stratagem.cluster.environment import cores
from stratagem.cluster.failure import failed
from stratagem.errors import ReplicaLost
from stratagem.replicas.pool import Pool
from stratagem.servers.local_workers import patiently
from stratagem.servers.shard_lines import Address
from stratagem.servers.task_main import serve
from stratagem.training.agreement import Patience

log = logging.getLogger("stratagem")


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
