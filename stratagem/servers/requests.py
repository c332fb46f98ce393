"""The requests that a server answers: one table, by name.

    @request("skip", MEMBER, serial=int)
    def skip(coordinator, participant, serial): ...

An entry says which part of a server answers, who may send the request, and the types of its
arguments; a type that includes None makes an argument optional. `body` reads the tensors of a
request.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, TypeVar

from torch import Tensor

from stratagem.cluster.star import Star
from stratagem.errors import UsageError
from stratagem.servers.participants import Participant
from stratagem.wire.tcp import Connection, Frame
from stratagem.wire.tree import TREE_LIMIT

log = logging.getLogger("stratagem")

Answer = tuple[Mapping[str, Any], Sequence[Tensor]]
Number = int | float


@dataclass(eq=False)
class Peer:
    """One connection, and the task at its other end.

    The token identifies the process: its heartbeat and its requests have the same, a process that
    replaces it has another.
    """

    connection: Connection
    role: str
    name: str
    token: str
    worker: int = -1
    chief: bool = False
    #: whether it meets the servers again, to go back to a checkpoint
    returns: bool = False
    #: the number of the server, if it is one; and the shard that the connection is about
    server: int = -1
    shard: int = -1
    said_bye: bool = False
    #: whether its end has been announced
    dismissed: bool = False
    #: the worker's place in the training, once it has joined
    participant: Participant | None = None
    #: whether it was called silent since its last heartbeat
    silent: bool = False
    #: of a heartbeat: what carries its beats, and the task's notes between them; None: no more
    star: Star[Peer] | None = None
    notes: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)

    @classmethod
    def of(cls, connection: Connection, hello: Mapping[str, Any], shard: int) -> Peer:
        """Make a peer from its first note; the connection is about `shard` unless it names one."""
        return cls(
            connection,
            str(hello.get("hello")),
            str(hello.get("name")),
            str(hello.get("token")),
            int(hello.get("worker", -1)),
            bool(hello.get("chief")),
            bool(hello.get("returns")),
            int(hello.get("server", -1)),
            int(hello.get("shard", shard)),
        )

    def tell(self, note: Mapping[str, Any]) -> None:
        """Send a note between two answers; a peer that does not receive it is found dead later."""
        if self.star is not None:
            self.star.post(note, to=self)
            return
        try:
            self.connection.send(note)
        except OSError as problem:
            log.info("%s does not listen: %s", self.name, problem)

    def hang_up(self) -> None:
        """Close the connection, which wakes the thread that waits for it."""
        if self.star is not None:
            self.star.hang_up(self)
            self.notes.put(None)
        self.connection.close()

    def offer(self, note: Mapping[str, Any]) -> bool:
        """As `tell`, without waiting, for a caller that holds a lock; False: try again later."""
        try:
            return self.connection.offer(note)
        except OSError as problem:
            log.info("%s does not listen: %s", self.name, problem)
            return True


class Sender(Enum):
    """Who may send a request."""

    WORKER = "any worker"
    MEMBER = "a worker that has joined the training"
    CHIEF = "the chief"


WORKER, MEMBER, CHIEF = Sender


@dataclass(frozen=True)
class Request:
    """One entry of the table.

    The handler gets the part of the server, the sender (a Peer; for MEMBER its Participant), the
    body if there is one, and the arguments by name. It returns a header, a header and tensors, or
    None.
    """

    handle: Callable[..., Any]
    part: str
    sender: Sender
    body: Callable[[Any, Peer, Frame], Any] | None
    arguments: Mapping[str, type | UnionType]

    def answer(self, parts: Mapping[str, Any], peer: Peer, frame: Frame) -> Answer:
        told = frame.header
        given: dict[str, Any] = {}
        for name, kind in self.arguments.items():
            given[name] = value = told.get(name)
            if not isinstance(value, kind):
                raise UsageError(
                    f"{peer.name} asks for {told['t']!r} with {name}={value!r:.60}, which must be "
                    f"{getattr(kind, '__name__', kind)}; install the same stratagem on every task."
                )
        who = self._check(peer, told["t"])
        if self.body is not None:
            given["body"] = self.body(parts["shard"], peer, frame)
        answer = self.handle(parts[self.part], who, **given)
        if answer is None:
            return {}, ()
        return (answer, ()) if isinstance(answer, dict) else answer

    def _check(self, peer: Peer, name: str) -> Any:
        if self.sender is CHIEF and not peer.chief:
            raise UsageError(f"{peer.name} asks for {name!r}, which is for the chief alone")
        if self.sender is not MEMBER:
            return peer
        if peer.participant is None:
            raise UsageError(f"{peer.name} asks for {name!r}, but has not joined a training")
        return peer.participant


REQUESTS: dict[str, Request] = {}
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def request(
    name: str,
    sender: Sender,
    *,
    part: str = "coordinator",
    body: Callable[[Any, Peer, Frame], Any] | None = None,
    **arguments: type | UnionType,
) -> Callable[[_Handler], _Handler]:
    """Enter a handler into the table under this name."""

    def enter(handler: _Handler) -> _Handler:
        REQUESTS[name] = Request(handler, part, sender, body, arguments)
        return handler

    return enter


def answer(parts: Mapping[str, Any], peer: Peer, frame: Frame) -> Answer:
    """Answer a request with the parts of this server."""
    name = frame.header.get("t")
    found = REQUESTS.get(name) if isinstance(name, str) else None
    if found is None or found.part not in parts:
        raise UsageError(f"ps {parts['shard'].index} does not know what {name!r} asks for")
    return found.answer(parts, peer, frame)


def tree(_: Any, peer: Peer, frame: Frame) -> Tensor:
    """Return the body as bytes, which the server does not parse."""
    return peer.connection.read(TREE_LIMIT)
