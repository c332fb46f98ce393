"""How servers are reached: each is tried until it answers, or is known to be gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.cluster.failure import Member
from stratagem.cluster.handshake import Stranger, WrongSecret
from stratagem.cluster.waiting import FIRST, Wait, missing_error, say_missing
from stratagem.wire.tcp import Connection, Frame, WireError, connect

log = logging.getLogger("stratagem")

TRY = 2.0  # seconds for one try
_RETRY = 0.1  # seconds between two


@dataclass(frozen=True)
class Address:
    """Where the servers are, and what proves that one belongs to their job."""

    servers: tuple[str, ...]
    secret: bytes


@dataclass(eq=False)
class Line:
    """A connection to one server, about one shard."""

    server: int
    connection: Connection
    #: the generation of servers in which it was made: one that came back later is another process
    made_in: int = 0


class _SomeAreGone(Exception):
    """The job goes on without some of its servers, which are waited for in vain."""


def meet(
    address: Address, hello: Mapping[str, Any], limit: float, watch: Callable[[], None]
) -> tuple[list[list[Line]], set[str]]:
    """By shard: a worker's line to its server; none to those that the coordinator knows are gone.
    And the hosts that they are on.

    `watch` is called while servers do not answer yet, and may raise.
    """
    hello, gone = {"hello": "worker", **hello}, set[int]()
    tasks = [(f"ps {i}", where) for i, where in enumerate(address.servers)]
    asking: list[Connection] = []

    def look() -> None:
        watch()
        if len(tasks) > 1 and (found := _gone(address, asking)) > gone:
            gone.update(found)
            raise _SomeAreGone

    try:
        while True:
            wanted = [i for i in range(len(tasks)) if i not in gone]
            said: dict[str, Mapping[str, Any]] = {}
            try:
                found = reach([tasks[i] for i in wanted], address.secret, hello, limit, look, said)
            except _SomeAreGone:
                continue
            here = dict(zip(wanted, found, strict=True))
            lines = [[Line(i, here[i])] if i in here else [] for i in range(len(tasks))]
            return lines, {str(each["welcome"]) for each in said.values()}
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
        if asking[0].readable(_RETRY) and (frame := asking[0].receive()) is not None:
            asking[0].send(question)
            return set(frame.header.get("gone", ()))
    except OSError as problem:
        log.info("ps 0 does not answer yet: %s", problem)
        asking.clear()
    return set()


def room(size: int, frame: Frame) -> Tensor:
    """Allocate memory for a part of a frame's body, which cannot be larger than the body."""
    if not 0 <= size <= frame.size:
        raise WireError(f"a part of {size} bytes was announced in a body of {frame.size}")
    return torch.empty(size, dtype=torch.uint8)


def reach(
    tasks: Sequence[tuple[str, str]],
    secret: bytes,
    hello: Mapping[str, Any],
    limit: float,
    watch: Callable[[], None] = lambda: None,
    welcomes: dict[str, Mapping[str, Any]] | None = None,
) -> list[Connection]:
    """A connection to each (name, address), all of which have been told `hello`.

    `watch` is called between two tries, and may raise: whoever started them knows if they died.
    `welcomes`: wait until each has answered, and put down what. One that is about to end does not,
    and another may take its place.
    """
    patience = Wait(limit, first=FIRST)
    found: dict[str, Connection] = {}
    why = ""
    try:
        while True:
            for name, address in tasks:
                if name not in found:
                    try:
                        found[name] = connect(address, secret, limit=min(TRY, limit))
                    except (Stranger, WrongSecret):
                        raise
                    except OSError as problem:
                        why = str(problem)
            missing = [Member(name, where) for name, where in tasks if name not in found]
            if not missing and _greet(found, hello, watch, patience, welcomes):
                break
            if patience.over:
                raise missing_error(missing, patience.waited, why)
            watch()
            say_missing(missing, patience)
            time.sleep(_RETRY)
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return [found[name] for name, _ in tasks]


def _greet(
    found: dict[str, Connection],
    hello: Mapping[str, Any],
    watch: Callable[[], None],
    patience: Wait,
    welcomes: dict[str, Mapping[str, Any]] | None,
) -> bool:
    """Send `hello` to each server; False if one does not answer, which is taken out."""
    if welcomes is None:
        for connection in found.values():
            connection.send(hello)
        return True
    new = [name for name in found if name not in welcomes]
    told = {name for name in new if _tell(found[name], hello)}
    for name in new:
        answer = _answer(found[name], watch, patience) if name in told else None
        if answer is None:
            found.pop(name).close()
        else:
            welcomes[name] = answer
    return not set(new) - set(welcomes)


def _tell(connection: Connection, hello: Mapping[str, Any]) -> bool:
    try:
        connection.send({**hello, "greets": True})
    except OSError as problem:
        log.info("%s has hung up: %s", connection.peer, problem)
        return False
    return True


def _answer(
    connection: Connection, watch: Callable[[], None], patience: Wait
) -> Mapping[str, Any] | None:
    try:
        while not connection.readable(_RETRY):
            if patience.over:
                return None
            watch()
        frame = connection.receive()
    except OSError as problem:
        log.info("%s has hung up: %s", connection.peer, problem)
        return None
    return None if frame is None else frame.header
