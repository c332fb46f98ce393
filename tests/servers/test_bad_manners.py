"""Servers survive workers that stop within a message, send nonsense or are late."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.cluster.framing import encode
from stratagem.servers import connections
from stratagem.servers import server as server_module
from stratagem.servers.client import Assignment, Client
from stratagem.servers.connections import Address
from stratagem.servers.peers import TaskHeartbeat
from stratagem.servers.server import Server
from stratagem.wire.channel import PlainChannel
from stratagem.wire.connection import Connection
from stratagem.wire.segment import Segment
from stratagem.wire.tcp import local_address
from tests.clock import PATIENCE, in_time
from tests.replicas.scripts import wait_for
from tests.servers.fault_support import count, local
from tests.servers.server_threads import ThreadedJob

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def job() -> Iterator[ThreadedJob]:
    made = ThreadedJob(1)
    yield made
    made.close()


@pytest.mark.slow
def test_a_chief_that_stops_in_mid_opening_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server reads a message, it must not hold the lock that it needs to end the job."""
    monkeypatch.setattr(server_module, "LINGER", 0.5)
    patience = sg.Patience(answer=3)
    server = Server(0, [local_address()], b"s" * 32, patience)
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except sg.ReplicaError as error:
            raised.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    chief = Client(0, "worker 0", True, Address(tuple(server.addresses), server.secret), patience)
    send = chief.lines.of(0)[0].connection.send
    whole: list[Tensor] = []

    def by_halves(header: dict[str, object], body: list[Tensor]) -> None:
        """Announce the values, send half of them, and stop: no further message and no heartbeat."""
        if header["t"] != "open":
            send(header, body)
            return
        whole.extend(body)
        size = sum(tensor.nbytes for tensor in body)
        start = encode(header, size) + bytes(size // 2)
        chief.lines.of(0)[0].connection._channel.send([memoryview(start)])
        chief.lines.heartbeat._star._beat = lambda: None  # type: ignore[method-assign]
        chief.lines.heartbeat._on_trouble = lambda _: None  # and keep its connections open
        raise InterruptedError

    chief.lines.of(0)[0].connection.send = by_halves  # type: ignore[method-assign, assignment]
    module = nn.Linear(50, 50)
    with pytest.raises(sg.ReplicaError):
        ThreadedJob.begin(
            _OneWorker(chief),
            module,
            torch.optim.SGD(module.parameters(), lr=0.1),  # type: ignore[arg-type]
        )
    thread.join(PATIENCE)
    chief.close(goodbye=False)
    assert whole and not thread.is_alive()
    assert [error.who for error in raised] == ["worker 0"]  # type: ignore[attr-defined]


class _OneWorker:
    """The servers' handle as `begin` expects it."""

    def __init__(self, worker: Client) -> None:
        self.workers, self.servers = [worker], [None]


def test_a_refused_request_with_a_body_harms_nobody(job: ThreadedJob) -> None:
    chief, module = job.workers[0], nn.Linear(2, 1)
    for told in ({"t": "assign", "pieces": []}, {"t": "what"}):
        with pytest.raises(sg.UsageError, match=r"no training is under way|does not know"):
            chief.lines.call(0, told, [torch.ones(5)])
    session = job.begin(module, torch.optim.SGD(module.parameters(), lr=0.1))
    session.end()
    assert job.servers[0].failure is None


def test_a_job_that_runs_needs_no_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if a worker other than the chief asks for statistics."""
    job = ThreadedJob(1, workers=2)

    def refused(*_: object) -> None:
        raise ConnectionRefusedError("a stranger was first")

    monkeypatch.setattr(connections, "connect_all", refused)
    for worker in job.workers:
        assert worker.stats() is None
    job.close()


def test_who_is_late_for_the_last_means_has_them_all_the_same() -> None:
    """The chief ends the training as soon as it has sent the last running means."""
    job = ThreadedJob(1, workers=2)
    made = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    sessions = [
        job.begin(module, torch.optim.SGD(module.parameters(), lr=0.1), worker=i)
        for i, module in enumerate(made)
    ]
    made[0].running_mean.fill_(3.0)  # type: ignore[union-attr]
    sessions[0].worker.deal(1, 0, [], True)
    assert not isinstance(sessions[0].worker.next(), Assignment)
    sessions[0].statistics.send()
    sessions[0].worker.finish(None)
    sessions[1].statistics.receive(1)
    assert made[1].running_mean.tolist() == [3.0, 3.0]  # type: ignore[union-attr, operator]
    for session in reversed(sessions):
        session.worker.memory.close()
        session.worker.ask("leave")
    job.close()


def test_more_values_announced_than_sent(job: ThreadedJob) -> None:
    """The request is refused before memory is allocated for the values."""
    chief, module = job.workers[0], nn.Linear(2, 1)
    session = job.begin(module, torch.optim.SGD(module.parameters(), lr=0.1))
    told = {"t": "open", "fit": 9, "plan": session.plan.to_json()}
    with pytest.raises(sg.UsageError, match="more values than it sends"):
        chief.lines.call(0, told, [torch.ones(1)])
    session.end()


def test_a_coordinator_that_is_gone_is_named_by_who_listens(job: ThreadedJob) -> None:
    """A worker that only listens raises the same error as a worker that sends requests."""
    chief = job.workers[0]
    here, there = socket.socketpair()
    (line,) = chief.lines.of(0)
    old, line.connection = line.connection, Connection(PlainChannel(here), "ps 0")
    there.sendall(b"ST")
    there.close()
    with pytest.raises(sg.ReplicaLost, match="ps 0"):
        chief.lines.listen()
    line.connection = old


def test_a_word_in_between_waits_for_nobody() -> None:
    """`offer` returns at once, even if the socket's buffer is full."""
    here, there = socket.socketpair()
    here.setblocking(False)
    try:
        while True:
            here.send(bytes(1 << 16))
    except BlockingIOError:
        connection = Connection(PlainChannel(here), "one that does not read")
    begun = time.monotonic()
    assert connection.offer({"news": 1}) is False
    in_time(time.monotonic() - begun, 5)
    connection.close()
    there.close()


def test_only_shared_memory_is_mapped(tmp_path: Path) -> None:
    """A handle comes over the network, so it may name any file."""
    file = tmp_path / "precious"
    file.write_bytes(b"p" * 64)
    fd = os.open(file, os.O_RDWR)
    mine = Segment(64)
    handle, _, size = mine.handle.rpartition(":")
    for wrong in (
        f"{file}:64",
        f"/proc/{os.getpid()}/fd/{fd}:64",
        "nonsense",
        f"{handle}:{int(size) * 2}",
        f"{handle}:-1",
        f"{handle}:x",
    ):
        with pytest.raises(sg.UsageError, match="shared memory"):
            Segment.attach(wrong)
    os.close(fd)
    assert file.read_bytes() == b"p" * 64
    assert Segment.attach(mine.handle).size == mine.size


def test_what_is_wrong_is_told_once() -> None:
    """If several threads report an error at once, the first one counts."""
    told: list[sg.ReplicaError] = []
    here, there = socket.socketpair()
    heartbeat = TaskHeartbeat(Connection(PlainChannel(here), "ps 0"), 60.0, told.append)
    troubles = [sg.ReplicaLost(f"number {i}", "ps 0") for i in range(8)]
    threads = [threading.Thread(target=heartbeat.fail, args=(each,)) for each in troubles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert told == [heartbeat.trouble]
    heartbeat.leave()
    there.close()


class Dawdle:
    """A loss function in which worker 1 sleeps once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if sg.current_replica().index == 1:
            time.sleep(self.seconds)
            self.seconds = 0.0
        return output.mean()


@pytest.mark.slow
def test_one_that_lives_but_keeps_others_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """It is named; after `Patience(step=)` it is dropped, and other workers compute its batches."""
    patience = sg.Patience(step=3)
    with closing(local(updates=sg.Synchronous(), patience=patience)) as strategy:
        count(strategy, epochs=1)
        with caplog.at_level(logging.WARNING, "stratagem"):
            counts = count(strategy, epochs=1, loss=Dawdle(30.0))
        assert (counts == 1).all()
        wait_for(lambda: "worker 1 has kept the others waiting for" in caplog.text)
        wait_for(lambda: "waiting for worker 1, " in caplog.text)
