"""A worker's connections: one to every server for its work, and one for its pulse.

Questions are answered in turn on each. What the lead says unasked ("news": the newest version)
comes between answers and is kept. When a connection ends, the pulse may know better why.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import ReplicaError, ReplicaFailed, StratagemError
from stratagem.rules.stats import Stats
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.pulse import KNOWS_BETTER, PulseThread
from stratagem.strategies.parameters.reach import reach
from stratagem.strategies.parameters.trouble import error_of, headline, lost
from stratagem.wire.segment import host_identity
from stratagem.wire.tcp import Frame, WireError
from stratagem.wire.tree import TREE_LIMIT, decode

#: "0" has tensors travel over sockets on one machine, too
SHARED_MEMORY = "STRATAGEM_SHARED_MEMORY"

log = logging.getLogger("stratagem")


@dataclass(frozen=True)
class Address:
    """Where the servers are, and what proves that one belongs to their job."""

    servers: tuple[str, ...]
    secret: bytes


class Lines:
    """The lines of one worker; server 0 is the lead."""

    def __init__(
        self, me: Mapping[str, Any], address: Address, patience: Patience,
        watch: Callable[[], None],
    ) -> None:  # fmt: skip
        """`me` is how the worker introduces itself; `watch` is called while servers do not answer
        yet, and may raise."""
        self.address = address
        self._name = str(me["name"])
        #: the newest version that the lead has told of
        self.news = 0
        #: whether somebody has been told here, by an error, that the job cannot go on
        self.fell = False
        hello = {**me, "token": secrets.token_hex(8)}
        tasks = [(f"ps {i}", where) for i, where in enumerate(address.servers)]
        limit = patience.arrive
        self._servers = reach(tasks, address.secret, {"hello": "worker", **hello}, limit, watch)
        try:
            (beats,) = reach(tasks[:1], address.secret, {"hello": "pulse", **hello}, limit, watch)
            self.pulse = PulseThread(beats, patience.answer, self._cut_off)
            here = host_identity()
            #: whether every server can map this process' memory
            self.near = os.environ.get(SHARED_MEMORY, "1") != "0" and all(
                self.call(i, {"t": "host"}).header["host"] == here for i in range(len(tasks))
            )
        except BaseException:
            self.hang_up()
            raise

    def __len__(self) -> int:
        """How many servers there are."""
        return len(self._servers)

    # --- talking ------------------------------------------------------------------------------

    def call(self, i: int, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> Frame:
        """Ask a server; its answer."""
        self.write(i, header, body)
        return self.receive(i)

    def write(self, i: int, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> None:
        self._check()
        try:
            self._servers[i].send(header, body)
        except OSError as problem:
            raise self._why(i) from problem

    def stream(self, i: int, header: dict[str, Any], size: int, parts: Any) -> None:
        """As `call`, for a body whose parts come one by one; the answer says nothing."""
        try:
            self._servers[i].stream(header, size, parts)
        except OSError as problem:
            raise self._why(i) from problem
        self.receive(i)

    def receive(self, i: int) -> Frame:
        connection = self._servers[i]
        while True:
            try:
                frame = connection.receive()
            except OSError as problem:
                raise self._why(i) from problem
            if frame is None:
                raise self._why(i)
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
        try:
            self._servers[i].read_into(into, more=more)
        except OSError as problem:
            raise self._why(i) from problem

    def tree(self, frame: Frame) -> Any:
        """What the lead has sent with an answer; None if nothing."""
        return decode(self._servers[0].read(TREE_LIMIT)) if frame.size else None

    def listen(self) -> None:
        """Hear what the lead has said unasked."""
        while self._servers[0].readable():
            try:
                frame = self._servers[0].receive()
            except OSError as problem:
                raise self._why(0) from problem
            if frame is None:
                raise self._why(0)
            self.news = max(self.news, int(frame.header["news"]))
        self._check()

    def stats(self) -> Stats | None:
        """The books; on a connection of its own, so that any thread may ask at any time."""
        hello = {"hello": "visitor", "name": self._name}
        (visit,) = reach([("ps 0", self.address.servers[0])], self.address.secret, hello, 5.0)
        try:
            frame = visit.receive()
        finally:
            visit.close()
        told = frame.header["stats"] if frame is not None else None
        return Stats.from_json(told) if told else None

    # --- the end ------------------------------------------------------------------------------

    def close(self, *, goodbye: bool) -> None:
        """Say goodbye to every server, the lead last."""
        for i in reversed(range(len(self) if goodbye else 0)):
            try:
                self.call(i, {"t": "bye"})
            except (OSError, StratagemError):
                continue  # it has gone first
        self.pulse.stop()
        self.hang_up()

    def hang_up(self) -> None:
        for connection in self._servers:
            connection.close()

    def _cut_off(self, trouble: ReplicaError) -> None:
        """The job cannot go on: say so, and wake whoever waits for a server."""
        if not (isinstance(trouble, ReplicaFailed) and trouble.who == self._name):  # it knows
            log.warning("%s", headline(trouble))
        self.hang_up()

    def _check(self) -> None:
        if self.pulse.trouble is not None:
            self.fell = True
            raise self.pulse.trouble

    def _why(self, i: int) -> ReplicaError:
        """A connection ended: the pulse may know better whose fault it was."""
        self.fell = True
        return self.pulse.explain(KNOWS_BETTER) or lost(f"ps {i}")


def room(size: int, frame: Frame) -> Tensor:
    """Memory for a part of a frame's body, which cannot be larger than that."""
    if not 0 <= size <= frame.size:
        raise WireError(f"a part of {size} bytes was announced in a body of {frame.size}")
    return torch.empty(size, dtype=torch.uint8)
