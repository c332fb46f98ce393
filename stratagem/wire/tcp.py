"""Connections between the tasks of a job, over TCP or, on one machine, over a Unix socket.

    listener = Listener("10.0.0.5:2222", secret, "ps 0", serve)   # serve(connection): a thread each
    connection = connect("10.0.0.5:2222", secret, limit=5)
    connection.send({"push": 7}, [gradient])

A peer proves the job's secret before a byte of it is parsed; what follows is encrypted unless the
address is of this machine only (loopback, Unix).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from stratagem.cluster.reception import AT_ONCE, GREETING
from stratagem.wire.address import encrypted, forget, is_unix, listen, local_address, reach
from stratagem.wire.connection import Connection
from stratagem.wire.forked import not_in_children
from stratagem.wire.frames import Frame, WireError
from stratagem.wire.greeting import Greeting
from stratagem.wire.tls import context

__all__ = ["Connection", "Frame", "Listener", "WireError", "connect", "local_address"]

log = logging.getLogger("stratagem")

_PAUSE = 0.2  # seconds to the next try when the process has no descriptor left
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def connect(address: str, secret: bytes, *, limit: float, tls: bool | None = None) -> Connection:
    """Connect and prove the secret, in one try of at most `limit` seconds.

    Raises OSError if nobody answers there, HandshakeError if who answers is not of this job.
    """
    encrypt = encrypted(address, tls)
    if encrypt:
        context(secret, False)  # takes long the first time: not while the peer waits
    deadline = time.monotonic() + limit
    greeting = Greeting(reach(address, limit), secret, server=False, tls=encrypt)
    connection = greeting.meet(deadline - time.monotonic())
    if not is_unix(address):
        connection.peer = address
    return connection


class Listener:
    """Listens on an address, and welcomes whoever proves the job's secret.

    `welcome` gets each connection in a thread of its own, may stay in it as long as it likes, and
    owns the connection. A peer that fails the greeting, or does not end it in time, costs one
    line in the log. At most 64 greet at once; others wait their turn in the kernel's queue.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        who: str,
        welcome: Callable[[Connection], None],
        *,
        tls: bool | None = None,
    ) -> None:
        self.address = address
        self._secret = secret
        self._welcome = welcome
        self._tls = encrypted(address, tls)
        if self._tls:
            context(secret, True)
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._greetings: set[Greeting] = set()
        self._closed = False
        self._sock = not_in_children(listen(address, who))
        self._sock.setblocking(False)
        self._wake_in, self._wake_out = map(not_in_children, socket.socketpair())
        self._thread = threading.Thread(target=self._attend, name="stratagem-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end what is still greeting; connections made stay with their owner."""
        if self._sock.fileno() < 0:
            return  # closed before, or a forked child's copy
        with self._lock:
            if self._closed:
                return
            self._closed = True
            greetings = list(self._greetings)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")
        for greeting in greetings:
            greeting.hang_up()
        self._thread.join()
        forget(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _attend(self) -> None:
        """Accept until closed, a thread for each who comes."""
        with (
            self._sock,
            self._wake_in,
            self._wake_out,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                self._places.acquire()
                sock = self._accept(selector)
                if sock is None:
                    return
                self._admit(Greeting(sock, self._secret, server=True, tls=self._tls))

    def _accept(self, selector: selectors.BaseSelector) -> socket.socket | None:
        short = False
        while True:
            selector.select()
            if self._closed:
                return None
            try:
                sock, _ = self._sock.accept()
            except OSError as problem:
                if problem.errno in _SHORTAGES:
                    if not short:
                        log.warning("cannot accept on %s: %s", self.address, problem.strerror)
                    short = True
                    time.sleep(_PAUSE)
                continue  # else it hung up before we came to the door
            sock.setblocking(True)
            return sock

    def _admit(self, greeting: Greeting) -> None:
        with self._lock:
            self._greetings.add(greeting)
        if self._closed:
            greeting.hang_up()
        thread = threading.Thread(
            target=self._greet, args=(greeting,), name="stratagem-greeting", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as problem:  # the system has no thread left: the door stays open
            log.warning("refused a connection from %s: %s", greeting.peer, problem)
            greeting.close()
            self._done(greeting)

    def _done(self, greeting: Greeting) -> None:
        with self._lock:
            self._greetings.discard(greeting)
        self._places.release()

    def _greet(self, greeting: Greeting) -> None:
        """Hear a peer out, in a thread of its own: one that says nothing holds up nobody."""
        try:
            connection = greeting.meet(GREETING)
        except OSError as problem:
            if not self._closed:
                log.warning("refused a connection from %s: %s", greeting.peer, problem)
            return
        finally:
            self._done(greeting)
        if self._closed:
            connection.close()
            return
        try:
            self._welcome(connection)
        except Exception:
            log.exception("serving %s failed; its connection is closed", connection.peer)
            connection.close()
