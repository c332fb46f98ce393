"""The heartbeats between a task and its coordinator, encrypted and plain."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time

import pytest

import stratagem as sg
from stratagem.cluster import heartbeat
from stratagem.servers.peers import Peers, TaskHeartbeat
from stratagem.servers.requests import Peer
from stratagem.wire.connection import Connection
from stratagem.wire.tcp import Listener, connect, local_address
from tests.clock import PATIENCE
from tests.ports import free_ports
from tests.replicas.scripts import wait_for

pytestmark = pytest.mark.timeout(60)


class Pair:
    """The peers of a coordinator, and the heartbeat of one worker."""

    def __init__(self, tls: bool, give_up: float = 60.0) -> None:
        came: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        address = f"127.0.0.1:{free_ports(1)[0]}" if tls else local_address()
        self.trouble: list[sg.ReplicaError] = []
        self.listener = Listener(address, b"s" * 32, "ps 0", came.put, tls=tls)
        line = connect(address, b"s" * 32, limit=20, tls=tls)
        self.peers = Peers(give_up)
        self.peer = Peer(came.get(timeout=20), "heartbeat", "worker 1", "token", 1, chief=True)
        self.peers.add(self.peer)
        self.peers.listen_to(self.peer)
        self.task = TaskHeartbeat(line, give_up, self.trouble.append)

    def close(self) -> None:
        self.task.leave()
        self.peers.close()
        self.listener.close()


@pytest.mark.parametrize("tls", [False, True])
def test_what_either_says_comes_to_the_other(tls: bool, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(tls)
    pair.task.tell({"holds": 3})
    assert pair.peer.notes.get(timeout=20) == {"holds": 3}
    pair.peers.say("worker 2 is gone", {"given up": "worker 2"})
    wait_for(lambda: pair.task.given_up == {"worker 2"}, 20)
    pair.task.announce(sg.ReplicaLost("worker 2 is gone", "worker 2"))
    told = pair.peer.notes.get(timeout=20)
    assert told is not None and told["dying"]["who"] == "worker 2"
    pair.task.leave()
    assert pair.peer.notes.get(timeout=20) == {"bye": 1} and not pair.trouble
    pair.close()


def test_a_coordinator_that_hangs_up_is_trouble() -> None:
    pair = Pair(tls=False)
    pair.peers.remove(pair.peer)
    assert pair.peer.notes.get(timeout=20) is None
    wait_for(lambda: bool(pair.trouble), 20)
    assert pair.trouble[0].who == "ps 0" and pair.task.await_trouble() is pair.trouble[0]
    pair.close()


def test_a_job_that_ends_is_over_before_who_waits_for_trouble_goes_on() -> None:
    """Else a server takes the end of the coordinator's orders for its death."""
    pair, order = Pair(tls=False), list[str]()

    def end() -> None:
        time.sleep(0.1)
        order.append("over")

    def wait() -> None:
        assert pair.task.await_trouble() is None
        order.append("goes on")

    pair.task.on_over = end
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    pair.peers.tell({"over": 1})
    waiting.join(PATIENCE)
    assert order == ["over", "goes on"]
    pair.close()


@pytest.mark.parametrize("side", ["task", "coordinator"])
def test_who_is_silent_is_named_and_given_up(
    side: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STALL", 0.5)  # so that it is named before it is given up
    pair, given_up = Pair(tls=False, give_up=1.5), list[str]()
    silent = pair.task._star if side == "task" else pair.peers._star
    assert silent is not None
    silent._beat = lambda: None  # type: ignore[method-assign]
    until = time.monotonic() + 20
    with caplog.at_level(logging.WARNING, "stratagem"):
        while not (given_up or pair.trouble) and time.monotonic() < until:
            pair.peers.check_silence(lambda peer, what: given_up.append(f"{peer.name} {what}"))
            time.sleep(0.1)
    name = "worker 1" if side == "task" else "ps 0"
    assert re.search(rf"{name} has been silent for \d s", caplog.text)
    assert bool(given_up) == (side == "task") == (not pair.trouble)
    pair.close()
