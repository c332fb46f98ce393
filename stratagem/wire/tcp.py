"""Connections between the tasks of a job, over TCP or, on one machine, over a Unix socket.

    listener = Listener("10.0.0.5:2222", secret, "ps 0", serve)   # serve(connection): a thread each
    connection = connect("10.0.0.5:2222", secret, limit=5)
    connection.send({"push": 7}, [gradient])

`unix:@name` is a Unix socket in Linux's abstract namespace, without a file. A peer proves the job's
secret before a byte of it is parsed; what follows is encrypted unless the address is of this
machine only (loopback, Unix). The kernel sizes the buffers; fixed ones were no faster.
"""

from __future__ import annotations

import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from stratagem.cluster import sockets
from stratagem.cluster.acceptor import GREETING, Acceptor
from stratagem.cluster.failure import Member
from stratagem.cluster.framing import VERSION
from stratagem.cluster.handshake import peer_name, prove, recv_note, send_note
from stratagem.cluster.parsing import quote
from stratagem.cluster.sockets import not_in_children
from stratagem.cluster.waiting import FIRST, Wait, reach
from stratagem.errors import ClusterError, HandshakeError
from stratagem.wire.channel import PlainChannel
from stratagem.wire.connection import Connection, Frame, WireError
from stratagem.wire.tls import TlsChannel, context, shake_hands, wrap

__all__ = [
    "Connection",
    "Frame",
    "Listener",
    "WireError",
    "connect",
    "connect_all",
    "local_address",
]

log = logging.getLogger("stratagem")

TRY = 2.0  # seconds for one try to connect
_LINUX = sys.platform == "linux"
_UNIX = "unix:@"
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_LOOK = 0.1  # seconds between two calls of `watch` while a peer does not answer


def local_address() -> str:
    """Return a new address for processes of this machine; unguessable, where Linux has such."""
    if _LINUX:
        return f"{_UNIX}stratagem-{secrets.token_hex(16)}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def encrypted(address: str, tls: bool | None) -> bool:
    """Whether to encrypt: as `tls` says, or if None, unless the address is local."""
    if address.startswith(_UNIX):
        return False
    try:
        local = sockets.is_loopback(address)
    except ValueError as problem:
        raise ClusterError(
            f"the address {quote(address)} {problem}; correct: 10.0.0.5:2222, or unix:@name"
        ) from None
    return not local if tls is None else tls


def _call(address: str, limit: float) -> socket.socket:
    """Connect within `limit` seconds; OSError if no listener answers."""
    if not address.startswith(_UNIX):
        return sockets.connect(address, limit)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(limit)
        sock.connect("\0" + address.removeprefix(_UNIX))
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _listen(address: str, who: str) -> socket.socket:
    """Listen on an address of this machine, on that interface only."""
    if not address.startswith(_UNIX):
        return sockets.listen(address, who)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + address.removeprefix(_UNIX))
        sock.listen(128)
    except OSError as problem:
        sock.close()
        raise ClusterError(f"{who} cannot listen on {address}: {problem.strerror}") from problem
    return sock


def connect(address: str, secret: bytes, *, limit: float, tls: bool | None = None) -> Connection:
    """Connect and prove the secret, in one try of at most `limit` seconds.

    Raises OSError if there is no answer, HandshakeError if the peer is not of this job.
    """
    encrypt = encrypted(address, tls)
    if encrypt:
        context(secret, False)  # slow the first time, so not while the peer waits
    deadline = time.monotonic() + limit
    sock = _call(address, limit)
    connection = meet(sock, secret, server=False, tls=encrypt, limit=deadline - time.monotonic())
    if not address.startswith(_UNIX):
        connection.peer = address
    return connection


def connect_all(
    members: Sequence[Member],
    secret: bytes,
    hello: Mapping[str, object],
    limit: float,
    watch: Callable[[], object] = lambda: None,
    *,
    answers: bool = True,
) -> list[Connection]:
    """Connect to each member and send it `hello`; `watch` as in `reach`.

    `answers`: wait until each has answered. A member that is about to end does not, and another
    process may take its place.
    """
    patience, greeted = Wait(limit, first=FIRST), set[Connection]()

    def left(found: Mapping[Member, Connection]) -> list[Member]:
        """Greet new connections; return the members whose connection failed."""
        new = {member: each for member, each in found.items() if each not in greeted}
        greeted_now = [m for m, each in new.items() if _greet(each, {**hello, "greets": answers})]
        for member in greeted_now:
            if not answers or _is_welcome(new[member], watch, patience):
                greeted.add(new[member])
        return [member for member, each in new.items() if each not in greeted]

    return reach(
        members,
        lambda member: connect(member.where, secret, limit=min(TRY, limit)),
        patience,
        watch,
        left,
    )


def _greet(connection: Connection, hello: Mapping[str, object]) -> bool:
    try:
        connection.send(hello)
    except OSError as problem:
        log.info("%s has hung up: %s", connection.peer, problem)
        return False
    return True


def _is_welcome(connection: Connection, watch: Callable[[], object], patience: Wait) -> bool:
    """Wait for the answer to `hello`, which names the peer's host."""
    try:
        while not connection.readable(_LOOK):
            if patience.over:
                return False
            watch()
        frame = connection.receive()
    except OSError as problem:
        log.info("%s has hung up: %s", connection.peer, problem)
        return False
    connection.host = "" if frame is None else str(frame.header.get("welcome"))
    return frame is not None


class Listener:
    """Listens on an address, and accepts peers that prove the job's secret.

    `welcome` gets each connection in a thread of its own, may block in it, and owns the connection.
    Peers that have not proved the secret are the acceptor's: their number is bounded, and they take
    no place from those that have.
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
        self._door = Acceptor(_listen(address, who), secret, self._greet, f"{who} at {address}")
        self._door.open()

    def close(self) -> None:
        """Stop listening; finished connections stay open."""
        self._door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _greet(self, sock: socket.socket) -> None:
        """Finish the greeting of a peer that has proved the secret; runs on its own thread."""
        peer = peer_name(sock)
        try:
            connection = meet(sock, self._secret, server=True, tls=self._tls, limit=GREETING)
        except OSError as problem:
            if not self._door.closed:
                self._door.refusals.tell(peer, problem)
            return
        if self._door.closed:
            connection.close()
            return
        try:
            self._welcome(connection)
        except Exception:
            log.exception("serving %s failed; its connection is closed", connection.peer)
            connection.close()


def meet(
    sock: socket.socket, secret: bytes, *, server: bool, tls: bool, limit: float
) -> Connection:
    """Make a Connection of a socket within `limit` seconds; close it on any error.

    First the proof of the secret, in messages of fixed size: nothing of a peer is parsed before it,
    by TLS neither. The server's side of it is in cluster/acceptor.py. Then a note from each end
    with its version of the frames and whether it encrypts. Then TLS, if both do.
    """
    deadline, peer = time.monotonic() + limit, peer_name(sock)
    not_in_children(sock)
    try:
        if sock.family != socket.AF_UNIX:
            _keep_alive(sock)
        if not server:
            prove(sock, secret, limit=_left(deadline))
        send_note(sock, {"wire": VERSION, "tls": tls}, limit=_left(deadline))
        _agree(peer, recv_note(sock, limit=_left(deadline)), tls)
        if not tls:
            return Connection(PlainChannel(sock), peer)
        sock = secure = not_in_children(wrap(sock, secret, server=server))
        shake_hands(secure, secret, limit=_left(deadline))
        return Connection(TlsChannel(secure), peer)
    except BaseException:
        sock.close()
        raise


def _keep_alive(sock: socket.socket) -> None:
    """Use keepalive to notice a machine that is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _agree(peer: str, note: dict[str, object], tls: bool) -> None:
    if note.get("wire") != VERSION:
        raise HandshakeError(
            f"{peer} belongs to this job but speaks version {quote(note.get('wire'))} of the wire, "
            f"this task version {VERSION}: install the same stratagem on every task, and give what "
            "listens there a port of its own"
        )
    if note.get("tls") is not tls:
        this, other = ("encrypts", "does not") if tls else ("does not encrypt", "does")
        raise HandshakeError(
            f"{peer} belongs to this job, but this side {this} and the other {other}: give both "
            "the same tls= and the same spelling of the address"
        )


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
