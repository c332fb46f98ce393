"""Two ends of a connection in one process, over each kind of socket."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from stratagem.wire.connection import WireError
from stratagem.wire.tcp import Connection, Listener, connect, local_address
from tests.clock import unless_late
from tests.ports import free_ports

SECRET = b"s" * 32
KINDS = ["tcp", "unix", "tls"]


def free_address(host: str = "127.0.0.1") -> str:
    return f"{host}:{free_ports(1, host)[0]}"


def address_for(kind: str) -> str:
    return local_address() if kind == "unix" else free_address()


@contextmanager
def listening(
    kind: str = "tcp", secret: bytes = SECRET
) -> Iterator[tuple[Listener, queue.SimpleQueue[Connection]]]:
    """A listener, and the connections that it has accepted."""
    arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    with Listener(
        address_for(kind), secret, "ps 0", arrived.put, tls=True if kind == "tls" else None
    ) as listener:
        yield listener, arrived


def call(kind: str, address: str, secret: bytes = SECRET, limit: float = 20.0) -> Connection:
    return connect(address, secret, limit=limit, tls=True if kind == "tls" else None)


@contextmanager
def pair(kind: str) -> Iterator[tuple[Connection, Connection]]:
    """Return the server's end and the client's end."""
    with (
        listening(kind) as (listener, arrived),
        call(kind, listener.address) as client,
        arrived.get(timeout=20) as server,
    ):
        yield server, client


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        unless_late(time.monotonic() < end, "it never came true")
        time.sleep(0.01)


def noise(size: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


class Lines(logging.Handler):
    """Capture what stratagem logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


def refused(end: Connection, action: object, lines: Lines, match: str | None = None) -> None:
    assert callable(action)
    with pytest.raises(WireError, match=match):
        action()
    assert [record.levelname for record in lines.records] == ["WARNING"]
    assert end.peer in lines.texts[0]
    assert end.receive() is None


def ended(end: Connection) -> bool:
    """Whether the stream has ended, or was reset because the peer left bytes unread."""
    try:
        return end.receive() is None
    except WireError:
        return True


class Outcome(threading.Thread):
    """A call on a thread; `result()` returns its result or raises its error."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._value: object = None
        self._problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._action()
        except BaseException as problem:
            self._problem = problem

    def result(self, seconds: float = 20.0) -> object:
        self.join(seconds)
        unless_late(not self.is_alive(), f"still waiting after {seconds} s")
        if self._problem is not None:
            raise self._problem
        return self._value
