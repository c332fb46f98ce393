"""A worker's lines to the servers, by shard; the coordinator has shard 0.

Where servers hold each other's shards there are several lines to a shard: what changes it is sent
over all of them, and what is asked of it over the first. A line that ends is forgotten as long as
another is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from stratagem.cluster.failure import error_of
from stratagem.errors import ReplicaError, ReplicaMissing
from stratagem.servers.heartbeat_thread import HeartbeatThread
from stratagem.servers.reach import TRY, Address, Line, reach
from stratagem.wire.tcp import Frame
from stratagem.wire.tree import TREE_LIMIT, decode


class LineLost(Exception):
    """A server is gone; another one that holds the shard is asked from now on."""


class ShardLines:
    """What is asked of the holders of shards, and told to them."""

    address: Address
    heartbeat: HeartbeatThread
    #: the newest version that the coordinator has told of
    news: int
    #: whether somebody has been told here, by an error, that the job cannot go on
    fell: bool
    _lines: list[list[Line]]
    #: servers that were not reached any more
    _lost: set[int]
    _hello: Mapping[str, Any]

    def _check(self) -> None:
        """Raise what has ended the job, if anything has."""
        raise NotImplementedError

    def _why(self, i: int) -> ReplicaError:
        """Why the last line to a shard has ended."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many servers there are."""
        return len(self._lines)

    def call(self, i: int, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> Frame:
        """Ask about a shard; the answer."""
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
        """Send over one line; False if it is lost, but not the shard."""
        self._check()
        try:
            line.connection.send(header, body)
        except OSError as problem:
            with self._do_without(i, line, problem):
                return False
        return True

    def receive(self, i: int) -> Frame:
        """Wait for the answer to what was written last; LineLost: write it again."""
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
                self.fell = self.fell or isinstance(error, ReplicaError)
                raise error
            return frame

    def read_into(self, i: int, into: Sequence[Tensor], *, more: bool = False) -> None:
        """The body of the last answer, or a part of it."""
        line = self._lines[i][0]
        try:
            line.connection.read_into(into, more=more)
        except OSError as problem:
            raise self._forget(i, line) from problem

    def tree(self, frame: Frame, i: int = 0) -> Any:
        """Return the tree that a server has sent with an answer; None if nothing."""
        try:
            return decode(self._lines[i][0].connection.read(TREE_LIMIT)) if frame.size else None
        except OSError as problem:
            raise self._why(i) from problem

    # --- several holders of a shard -------------------------------------------------------------

    def of(self, i: int) -> list[Line]:
        """All lines to a shard, that over which it is asked first."""
        return list(self._lines[i])

    def write_to(
        self, i: int, lines: Sequence[Line], header: Mapping[str, Any], body: Sequence[Tensor] = ()
    ) -> list[tuple[int, Line]]:
        """Send over these lines; those whose answer, which says nothing, is to be waited for."""
        return [(i, line) for line in lines if self._write(i, line, header, body)]

    def finish(self, i: int, line: Line) -> None:
        """Wait for an answer that says nothing."""
        try:
            self._receive(i, line)
        except LineLost:
            return

    def call_all(self, i: int, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> None:
        """Tell all that hold a shard something which has no answer."""
        for sent in self.write_to(i, self.of(i), header, body):
            self.finish(*sent)

    def stream(self, i: int, line: Line, header: dict[str, Any], size: int, parts: Any) -> None:
        """Send a body whose parts come one by one; the answer says nothing."""
        try:
            line.connection.stream(header, size, parts)
        except OSError as problem:
            with self._do_without(i, line, problem):
                return
        self.finish(i, line)

    @contextmanager
    def _do_without(self, i: int, line: Line, problem: OSError | None) -> Iterator[None]:
        """Go on in the block if another line to the shard is left; raise otherwise."""
        error = self._forget(i, line)
        if not isinstance(error, LineLost):
            raise error from problem
        yield

    def _forget(self, i: int, line: Line) -> Exception:
        """A line has ended: LineLost if another server holds the shard, else why the job ends."""
        line.connection.close()
        if self.heartbeat.trouble is None and any(other is not line for other in self._lines[i]):
            self._lines[i] = [other for other in self._lines[i] if other is not line]
            self._lost.add(line.server)
            return LineLost()
        return self._why(i)

    def take_lost(self) -> list[int]:
        """The servers that were not reached any more, since this was last asked."""
        lost, self._lost = self._lost, set()
        return sorted(lost)

    def renew(
        self, table: Sequence[Sequence[int]], since: Sequence[int], generation: int
    ) -> list[tuple[int, Line]]:
        """Have a line to every server that holds a shard, and to no other; the new ones.

        A line that was made before its server came back leads to a process that is dead.
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
        """A line to a server that holds a shard besides its own; None: it is gone already."""
        task = (f"ps {server}", self.address.servers[server])
        hello = {"hello": "copy", "shard": shard, **self._hello}
        try:
            (found,) = reach([task], self.address.secret, hello, TRY, self._check)
        except ReplicaMissing:
            self._lost.add(server)
            return None
        return Line(server, found, generation)
