"""A job in one process: servers in threads, and their workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

import stratagem as sg
from stratagem.cluster.handshake import job_secret
from stratagem.servers.client import Client
from stratagem.servers.connections import Address
from stratagem.servers.server import Server
from stratagem.servers.session import Session
from stratagem.training.settings import Served
from stratagem.wire.tcp import local_address
from tests.clock import PATIENCE
from tests.ports import free_ports


class ThreadedJob:
    """Servers in threads of this process, and their workers."""

    def __init__(
        self,
        servers: int,
        workers: int = 1,
        *,
        addresses: Sequence[str] = (),
        secret: bytes = b"s" * 32,
    ) -> None:
        self.addresses = list(addresses) or [local_address() for _ in range(servers)]
        self.secret = secret
        self.servers = [Server(i, self.addresses, self.secret) for i in range(servers)]
        self.threads = [threading.Thread(target=s.serve, daemon=True) for s in self.servers]
        for thread in self.threads:
            thread.start()
        self.workers = [self.client(i) for i in range(workers)]

    def client(self, index: int) -> Client:
        """Connect as a worker."""
        address = Address(tuple(self.addresses), self.secret)
        return Client(index, f"worker {index}", index == 0, address, sg.Patience())

    def begin(
        self, module: nn.Module, optimizer: Any, *, worker: int = 0, **served: Any
    ) -> Session:
        rule = Served(
            served.get("updates", sg.Asynchronous()),
            served.get("partitioner"),
            len(self.workers),
            len(self.servers),
            served.get("backups", 0),
        )
        return Session(self.workers[worker], module, optimizer, rule)

    def close(self) -> None:
        for worker in reversed(self.workers):  # the chief last
            worker.close()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@contextmanager
def evaluator() -> Iterator[tuple[ThreadedJob, sg.ParameterServerStrategy]]:
    """A job with one server, and the strategy of its evaluator task."""
    worker, server = (f"127.0.0.1:{port}" for port in free_ports(2))
    spec = sg.ClusterSpec({"worker": [worker], "ps": [server]})
    job = ThreadedJob(1, addresses=[server], secret=job_secret({}, spec.to_json()))
    strategy = sg.ParameterServerStrategy(sg.Place(spec, sg.Task("evaluator"), "the test"))
    try:
        yield job, strategy
    finally:
        strategy.close()
        job.close()
