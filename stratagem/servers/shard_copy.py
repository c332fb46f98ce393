"""Copies of shards, sent to a server that has come back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from stratagem.cluster.failure import Member
from stratagem.errors import ReplicaError
from stratagem.servers.shard import Shard
from stratagem.servers.training_plan import TrainingPlan
from stratagem.wire.tcp import Connection, connect_all
from stratagem.wire.tree import TREE_LIMIT, decode, encode

log = logging.getLogger("stratagem")


def copy_of(shard: Shard) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the present state of a shard as it is sent; empty before the first fit."""
    with shard.changed:
        if shard.plan is None:
            return {"plan": None}, []
        store = shard.store
        taken = store.snapshot()
        header = {
            "plan": shard.plan.to_json(),
            "fit": shard.fit,
            "done": shard.done,
            "version": taken.version,
            "settings": store.settings(),
        }
        return header, [encode([taken.values.cpu(), taken.states, store.sum.copy()])]


def take_copy(shard: Shard, connection: Connection) -> None:
    """Take over another holder's copy."""
    frame = connection.receive()
    if frame is None:
        raise ConnectionResetError("the holder hung up before it had sent its copy")
    told = frame.header
    if told["plan"] is not None and int(told["fit"]) < shard.fit:
        connection.skip(TREE_LIMIT)  # the chief has begun another fit here since
    elif told["plan"] is not None:
        tree = frame.room(frame.size)
        connection.read_into([tree])
        values, states, waiting = decode(tree)
        with shard.changed:
            shard.open(TrainingPlan.from_json(told["plan"]), int(told["fit"]))
            shard.store.set_settings(told["settings"])
            shard.store.restore(values, states, int(told["version"]))
            shard.store.sum.take_over(waiting)
            shard.done = int(told["done"])
            shard.changed.notify_all()
    connection.send({})


class HeldHere:
    """The shards of one server: its own, and those that it holds for others."""

    def __init__(self, own: Shard, secret: bytes, limit: float, cores: int | None) -> None:
        self._own, self._secret, self._limit, self._cores = own, secret, limit, cores
        self._shards = {own.index: own}
        self._copied: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def of(self, number: int) -> Shard:
        """Return a shard; make it at the first call."""
        with self._lock:
            if number not in self._shards:
                made = Shard(number, self._own.device, self._cores)
                made.failure = self._own.failure
                self._shards[number] = made
            return self._shards[number]

    def fail(self, failure: ReplicaError) -> None:
        """End all waits with this error."""
        with self._lock:
            for shard in self._shards.values():
                shard.failure = failure

    def send_copy(self, number: int, address: str) -> None:
        """Copy a shard as it is now, and send it to the server at this address in a thread."""
        copy = copy_of(self.of(number))
        hello = {"hello": "source", "name": f"the holder of shard {number}", "shard": number}
        there = [Member(f"ps of shard {number}", address)]

        def send() -> None:
            try:
                (line,) = connect_all(there, self._secret, hello, self._limit, answers=False)
                with line:
                    line.send(*copy)
                    line.receive()  # it has arrived
            except (OSError, ReplicaError) as problem:
                log.info("the copy of shard %d did not arrive: %s", number, problem)

        threading.Thread(target=send, name="stratagem-copy", daemon=True).start()

    def _arrived(self, number: int) -> threading.Event:
        with self._lock:
            return self._copied.setdefault(number, threading.Event())

    def receive_copy(self, number: int, connection: Connection) -> None:
        """Take another holder's copy of a shard."""
        take_copy(self.of(number), connection)
        self._arrived(number).set()

    def await_copy(self, number: int, over: Callable[[], bool]) -> None:
        """Wait for a copy until the job is `over`."""
        while not self._arrived(number).wait(0.5) and not over():
            continue
