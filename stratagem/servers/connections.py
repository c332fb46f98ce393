"""A worker's connections: one to every server for its work, and one for its heartbeat.

Questions are answered in turn on each. What the coordinator says unasked ("news": the newest
version) comes between answers and is kept. When a connection ends, the heartbeat may know better
why.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.failure import headline, is_server_lost, server_lost
from stratagem.errors import ReplicaError, ReplicaFailed, StratagemError
from stratagem.rules.stats import Stats
from stratagem.servers.shard_lines import Address, Line, LineLost, ShardLines
from stratagem.servers.task_heartbeat import TaskHeartbeat
from stratagem.training.agreement import Patience
from stratagem.wire.segment import host_identity
from stratagem.wire.tcp import TRY, Connection, connect, connect_all

#: "0" has tensors travel over sockets on one machine, too
SHARED_MEMORY = "STRATAGEM_SHARED_MEMORY"

log = logging.getLogger("stratagem")

_LOOK = 0.1  # seconds that an answer of the coordinator's is waited for between two tries


class _SomeAreGone(Exception):
    """The job goes on without some of its servers, which are waited for in vain."""


class Connections(ShardLines):
    """The lines of one worker, its heartbeat, and a line for questions about statistics."""

    def __init__(
        self,
        me: Mapping[str, Any],
        address: Address,
        patience: Patience,
        watch: Callable[[], None],
    ) -> None:
        """`me` is how the worker introduces itself; `watch` is called while servers do not answer
        yet, and may raise."""
        self.address = address
        self._name = str(me["name"])
        #: the newest version that the coordinator has told of
        self.news = 0
        #: whether somebody has been told here, by an error, that the job cannot go on
        self.fell = False
        #: whether the training goes back to a checkpoint where a server is lost
        self.resumes = False
        self._visit: Connection | None = None
        self._asking = threading.Lock()
        hello = {**me, "token": secrets.token_hex(8)}
        limit = patience.arrive
        self._hello, self._limit = hello, limit
        self._lost: set[int] = set()
        self._lines = _meet(address, hello, limit, watch)
        hosts = {line.connection.host for lines in self._lines for line in lines}
        try:
            beats = self._call_on_coordinator({"hello": "heartbeat", **hello}, watch)
            self.heartbeat = TaskHeartbeat(beats, patience.answer, self._cut_off)
            self._visit = self._call_on_coordinator({"hello": "visitor", "name": self._name})
            #: whether every server can map this process' memory
            self.near = os.environ.get(SHARED_MEMORY, "1") != "0" and hosts == {host_identity()}
        except BaseException:
            self.hang_up()
            raise

    # --- talking ------------------------------------------------------------------------------

    def listen(self) -> None:
        """Read what the coordinator has said unasked."""
        coordinator = self._lines[0][0].connection
        while coordinator.readable():
            try:
                frame = coordinator.receive()
            except OSError as problem:
                raise self._why(0) from problem
            if frame is None:
                raise self._why(0)
            self.news = max(self.news, int(frame.header["news"]))
        self._check()

    def stats(self) -> Stats | None:
        """Return the coordinator's statistics; any thread may ask at any time.

        The connection is made at the start: a new one might queue behind others.
        """
        assert self._visit is not None
        with self._asking:
            try:
                self._visit.send({"t": "stats"})
                frame = self._visit.receive()
            except OSError as problem:
                raise self._why(0) from problem
        if frame is None:
            raise self._why(0)
        told = frame.header["stats"]
        return Stats.from_json(told) if told else None

    def _call_on_coordinator(
        self, hello: Mapping[str, Any], watch: Callable[[], None] | None = None
    ) -> Connection:
        coordinator, secret = self.address.members()[:1], self.address.secret
        watch = watch or self._check
        return connect_all(coordinator, secret, hello, self._limit, watch, answers=False)[0]

    # --- the end ------------------------------------------------------------------------------

    def close(self, *, goodbye: bool) -> None:
        """Say goodbye to every server, the coordinator last."""
        for i in reversed(range(len(self) if goodbye else 0)):
            for line in reversed(self.of(i)):
                try:
                    self.write_to(i, [line], {"t": "bye"})
                    self._receive(i, line)
                except (OSError, StratagemError, LineLost):
                    continue  # it has gone first
        self.heartbeat.stop()
        self.hang_up()

    def hang_up(self) -> None:
        for lines in self._lines:
            for line in list(lines):
                line.connection.close()
        if self._visit is not None:
            self._visit.close()

    def _cut_off(self, trouble: ReplicaError) -> None:
        """Say that the job cannot go on, and wake every thread that waits for a server."""
        knows = isinstance(trouble, ReplicaFailed) and trouble.who == self._name
        if not (knows or (self.resumes and is_server_lost(trouble))):
            log.warning("%s", headline(trouble))
        self.hang_up()

    def interrupt(self, error: BaseException) -> None:
        """From another thread: end every wait here with this error."""
        if isinstance(error, ReplicaError):
            self.heartbeat.fall(error)
        else:
            self.hang_up()

    def _check(self) -> None:
        if self.heartbeat.trouble is not None:
            self.fell = True
            raise self.heartbeat.trouble

    # --- several holders of a shard -------------------------------------------------------------

    def _why(self, i: int) -> ReplicaError:
        """Return why a connection ended; the heartbeat may know better than the connection."""
        self.fell = True
        return self.heartbeat.explain() or server_lost(f"ps {i}")


def _meet(
    address: Address, hello: Mapping[str, Any], limit: float, watch: Callable[[], None]
) -> list[list[Line]]:
    """By shard: a worker's line to its server; none to those that the coordinator knows are gone.

    `watch` is called while servers do not answer yet, and may raise.
    """
    hello, gone, tasks = {"hello": "worker", **hello}, set[int](), address.members()
    asking: list[Connection] = []

    def look() -> None:
        watch()
        if len(tasks) > 1 and (found := _gone(address, asking)) > gone:
            gone.update(found)
            raise _SomeAreGone

    try:
        while True:
            wanted = [i for i in range(len(tasks)) if i not in gone]
            try:
                found = connect_all([tasks[i] for i in wanted], address.secret, hello, limit, look)
            except _SomeAreGone:
                continue
            here = dict(zip(wanted, found, strict=True))
            return [[Line(i, here[i])] if i in here else [] for i in range(len(tasks))]
    finally:
        for connection in asking:
            connection.close()


def _gone(address: Address, asking: list[Connection]) -> set[int]:
    """Return which servers the coordinator says are gone; `asking` is the line to it."""
    question = {"t": "holders", "generation": -1, "lost": []}
    try:
        if not asking:
            asking.append(connect(address.servers[0], address.secret, limit=TRY))
            asking[0].send({"hello": "visitor", "name": "a worker that comes"})
            asking[0].send(question)
        if asking[0].readable(_LOOK) and (frame := asking[0].receive()) is not None:
            asking[0].send(question)
            return set(frame.header.get("gone", ()))
    except OSError as problem:
        log.info("ps 0 does not answer yet: %s", problem)
        asking.clear()
    return set()
