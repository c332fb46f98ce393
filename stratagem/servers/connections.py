"""A worker's connections: lines to the servers by shard, and one for its heartbeat.

The coordinator has shard 0. On each line, requests are answered in turn. Where servers hold each
other's shards there are several lines to a shard: changes are sent over all of them, questions
over the first. A line that ends is dropped if another to its shard is left. Between answers the
coordinator sends "news", the newest version, unasked. When a connection ends, the heartbeat may
know the cause.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stratagem.cluster.failure import (
    Member,
    error_of,
    headline,
    is_server_lost,
    job_over,
    server_lost,
)
from stratagem.errors import ReplicaError, ReplicaFailed, ReplicaMissing, StratagemError
from stratagem.rules.stats import Stats
from stratagem.servers.peers import TaskHeartbeat
from stratagem.training.agreement import Patience
from stratagem.wire.segment import host_identity
from stratagem.wire.tcp import TRY, Connection, Frame, connect_all
from stratagem.wire.tree import TREE_LIMIT, decode

log = logging.getLogger("stratagem")

#: environment variable; "0" sends tensors over sockets, even on one machine
SHARED_MEMORY = "STRATAGEM_SHARED_MEMORY"


@dataclass(frozen=True)
class Address:
    """The addresses of the servers, and the secret of their job."""

    servers: tuple[str, ...]
    secret: bytes

    def members(self) -> list[Member]:
        return [Member(f"ps {i}", where) for i, where in enumerate(self.servers)]


@dataclass(eq=False)
class Line:
    """A connection to one server, about one shard."""

    server: int
    connection: Connection
    #: the generation of servers in which it was made; a server that came back is another process
    made_in: int = 0


class LineLost(Exception):
    """A server is gone; from now on another holder of the shard is asked."""


class ShardLines:
    """The lines to the holders of each shard: requests and their answers."""

    address: Address
    heartbeat: TaskHeartbeat
    #: the newest version, as far as the coordinator has told
    news: int
    #: whether an error of the job has been raised to a caller
    has_raised: bool
    _lines: list[list[Line]]
    #: servers that could not be reached since the last `take_lost`
    _lost: set[int]
    _hello: Mapping[str, Any]

    def _check(self) -> None:
        """Raise the error that has ended the job, if there is one."""
        raise NotImplementedError

    def _why(self, i: int) -> ReplicaError:
        """Return why the last line to a shard has ended."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self._lines)

    def call(self, i: int, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> Frame:
        """Send a request about a shard; return the answer."""
        while True:
            self.write(i, header, body)
            try:
                return self.receive(i)
            except LineLost:
                continue

    def write(self, i: int, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> None:
        while not self._write(i, self._lines[i][0], header, body):
            continue

    def _write(self, i: int, line: Line, header: Mapping[str, Any], body: Sequence[Tensor]) -> bool:
        """Send over one line; return False if it is lost but another holder is left."""
        self._check()
        try:
            line.connection.send(header, body)
        except OSError as problem:
            self._do_without(i, line, problem)
            return False
        return True

    def receive(self, i: int) -> Frame:
        """Wait for the answer to the last request; on LineLost the caller writes it again."""
        return self._receive(i, self._lines[i][0])

    def _receive(self, i: int, line: Line) -> Frame:
        while True:
            try:
                frame = line.connection.receive()
            except OSError as problem:
                raise self._forget(i, line) from problem
            if frame is None:
                raise self._forget(i, line)
            if "news" in frame.header:
                self.news = max(self.news, int(frame.header["news"]))
                continue
            if "error" in frame.header:
                error = error_of(frame.header)
                self.has_raised = self.has_raised or isinstance(error, ReplicaError)
                raise error
            return frame

    def read_into(self, i: int, into: Sequence[Tensor], *, more: bool = False) -> None:
        """Read the body of the last answer, or the next part of it with `more`."""
        line = self._lines[i][0]
        try:
            line.connection.read_into(into, more=more)
        except OSError as problem:
            raise self._forget(i, line) from problem

    def tree(self, frame: Frame, i: int = 0) -> Any:
        """Return the tree in the body of an answer; None if it has no body."""
        try:
            return decode(self._lines[i][0].connection.read(TREE_LIMIT)) if frame.size else None
        except OSError as problem:
            raise self._why(i) from problem

    # --- several holders of a shard -------------------------------------------------------------

    def of(self, i: int) -> list[Line]:
        """Return all lines to a shard; the first one is for questions."""
        return list(self._lines[i])

    def write_to(
        self, i: int, lines: Sequence[Line], header: Mapping[str, Any], body: Sequence[Tensor] = ()
    ) -> list[tuple[int, Line]]:
        """Send over these lines; return those whose empty answer must be waited for."""
        return [(i, line) for line in lines if self._write(i, line, header, body)]

    def finish(self, i: int, line: Line) -> None:
        """Wait for an empty answer."""
        try:
            self._receive(i, line)
        except LineLost:
            return

    def call_all(self, i: int, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> None:
        """Send a request to all holders of a shard, and wait for their empty answers."""
        for sent in self.write_to(i, self.of(i), header, body):
            self.finish(*sent)

    def stream(self, i: int, line: Line, header: dict[str, Any], size: int, parts: Any) -> None:
        """Send a body part by part, and wait for the empty answer."""
        try:
            line.connection.stream(header, size, parts)
        except OSError as problem:
            self._do_without(i, line, problem)
        else:
            self.finish(i, line)

    def _do_without(self, i: int, line: Line, problem: OSError) -> None:
        """Drop a line that has ended; raise if no other one to the shard is left."""
        error = self._forget(i, line)
        if not isinstance(error, LineLost):
            raise error from problem

    def _forget(self, i: int, line: Line) -> Exception:
        """Drop a line that has ended; return LineLost if another server holds the shard, else the
        error that ends the job."""
        line.connection.close()
        if self.heartbeat.trouble is None and any(other is not line for other in self._lines[i]):
            self._lines[i] = [other for other in self._lines[i] if other is not line]
            self._lost.add(line.server)
            return LineLost()
        return self._why(i)

    def take_lost(self) -> list[int]:
        """Return the servers that were lost since the last call."""
        lost, self._lost = self._lost, set()
        return sorted(lost)

    def renew(
        self, table: Sequence[Sequence[int]], since: Sequence[int], generation: int
    ) -> list[tuple[int, Line]]:
        """Connect to every holder of each shard, close all other lines, and return the new ones.

        A line that was made before its server came back leads to a dead process.
        """
        new = []
        for i, servers in enumerate(table):
            here = {}
            for line in self.of(i):
                if line.server in servers and line.made_in >= since[line.server]:
                    here[line.server] = line
                else:
                    line.connection.close()
            for server in [each for each in servers if each not in here]:
                if (found := self._reach(i, server, generation)) is not None:
                    here[server] = found
                    new.append((i, found))
            self._lines[i] = [here[server] for server in servers if server in here]
            if not here:
                raise self._why(i)
        return new

    def _reach(self, shard: int, server: int, generation: int) -> Line | None:
        """Connect to a server that holds another's shard; return None if it is gone."""
        task = self.address.members()[server]
        hello = {"hello": "copy", "shard": shard, **self._hello}
        try:
            (found,) = connect_all(
                [task], self.address.secret, hello, TRY, self._check, answers=False
            )
        except ReplicaMissing:
            self._lost.add(server)
            return None
        return Line(server, found, generation)


class Connections(ShardLines):
    """The lines of one worker, its heartbeat, and a connection to ask for statistics."""

    def __init__(
        self,
        me: Mapping[str, Any],
        address: Address,
        patience: Patience,
        watch: Callable[[], None],
    ) -> None:
        """`me` is the worker's first message; `watch` is called while servers do not answer yet,
        and may raise."""
        self.address = address
        self._name = str(me["name"])
        #: the newest version, as far as the coordinator has told
        self.news = 0
        #: whether an error of the job has been raised to a caller
        self.has_raised = False
        #: whether the training goes back to a checkpoint where a server is lost
        self.resumes = False
        self._visit: Connection | None = None
        self._asking = threading.Lock()
        hello = {**me, "token": secrets.token_hex(8)}
        limit = patience.arrive
        self._hello, self._limit = hello, limit
        self._lost: set[int] = set()
        found = connect_all(
            address.members(), address.secret, {"hello": "worker", **hello}, limit, watch
        )
        self._lines = [[Line(i, connection)] for i, connection in enumerate(found)]
        hosts = {line.connection.host for lines in self._lines for line in lines}
        try:
            beats = self._call_on_coordinator({"hello": "heartbeat", **hello}, watch)
            self.heartbeat = TaskHeartbeat(beats, patience.answer, self._cut_off)
            self._visit = self._call_on_coordinator({**hello, "hello": "visitor"})
            #: whether every server can map this process's memory
            self.near = os.environ.get(SHARED_MEMORY, "1") != "0" and hosts == {host_identity()}
        except BaseException:
            self.hang_up()
            raise

    # --- talking ------------------------------------------------------------------------------

    def listen(self) -> None:
        """Read the news that the coordinator has sent."""
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
        """Return the coordinator's statistics; any thread may call at any time.

        They have their own connection, made at the start: a new one might queue behind others.
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
        """Close all connections, after a goodbye to every server, the coordinator last."""
        for i in reversed(range(len(self) if goodbye else 0)):
            for line in reversed(self.of(i)):
                try:
                    self.write_to(i, [line], {"t": "bye"})
                    self._receive(i, line)
                except (OSError, StratagemError, LineLost):
                    continue  # it has gone first
        self.heartbeat.leave()
        self.hang_up()

    def hang_up(self) -> None:
        for lines in self._lines:
            for line in list(lines):
                line.connection.close()
        if self._visit is not None:
            self._visit.close()

    def _cut_off(self, trouble: ReplicaError) -> None:
        """Log that the job cannot go on, and wake every thread that waits for a server."""
        knows = isinstance(trouble, ReplicaFailed) and trouble.who == self._name
        if not (knows or (self.resumes and is_server_lost(trouble))):
            log.warning("%s", headline(trouble))
        self.hang_up()

    def interrupt(self, error: BaseException) -> None:
        """End every wait for a server with this error, from another thread."""
        if isinstance(error, ReplicaError):
            self.heartbeat.fail(error)
        else:
            self.hang_up()

    def _check(self) -> None:
        if self.heartbeat.trouble is not None:
            self.has_raised = True
            raise self.heartbeat.trouble

    # --- several holders of a shard -------------------------------------------------------------

    def _why(self, i: int) -> ReplicaError:
        """Return why a connection ended; the heartbeat may know the cause."""
        self.has_raised = True
        trouble = self.heartbeat.await_trouble()
        return trouble or (job_over() if self.heartbeat.over else server_lost(f"ps {i}"))
