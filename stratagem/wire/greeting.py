"""The first words on a new connection, until both ends know that they belong together.

First the proof of the secret, in messages of fixed size: before it nothing that a peer says is
parsed, by TLS neither. Then a note from each end, which frames it speaks and whether it encrypts.
Then TLS, if both do.
"""

from __future__ import annotations

import socket
import time

from stratagem.cluster.handshake import peer_name, prove, recv_note, send_note
from stratagem.cluster.parsing import quote
from stratagem.errors import HandshakeError
from stratagem.wire.address import tune
from stratagem.wire.channel import PlainChannel, hang_up
from stratagem.wire.connection import Connection
from stratagem.wire.forked import not_in_children
from stratagem.wire.frames import VERSION
from stratagem.wire.tls import TlsChannel, shake_hands, wrap


class Greeting:
    """A socket on its way to become a Connection."""

    def __init__(self, sock: socket.socket, secret: bytes, *, server: bool, tls: bool) -> None:
        self.peer = peer_name(sock)
        self._sock = not_in_children(sock)
        self._secret = secret
        self._server = server
        self._tls = tls

    def meet(self, limit: float) -> Connection:
        """Greet within `limit` seconds; OSError, mostly HandshakeError, and all is closed."""
        try:
            return self._meet(time.monotonic() + limit)
        except BaseException:
            self.close()
            raise

    def _meet(self, deadline: float) -> Connection:
        tune(self._sock)
        prove(self._sock, self._secret, server=self._server, limit=_left(deadline))
        send_note(self._sock, {"wire": VERSION, "tls": self._tls}, limit=_left(deadline))
        self._agree(recv_note(self._sock, limit=_left(deadline)))
        if not self._tls:
            return Connection(PlainChannel(self._sock), self.peer)
        self._sock = secure = not_in_children(wrap(self._sock, self._secret, server=self._server))
        shake_hands(secure, self._secret, limit=_left(deadline))
        return Connection(TlsChannel(secure), self.peer)

    def _agree(self, note: dict[str, object]) -> None:
        if note.get("wire") != VERSION:
            raise HandshakeError(
                f"{self.peer} belongs to this job but speaks version {quote(note.get('wire'))} of "
                f"the wire, this task version {VERSION}: install the same stratagem on every "
                "task, and give what listens there a port of its own"
            )
        if note.get("tls") is not self._tls:
            this, other = ("encrypts", "does not") if self._tls else ("does not encrypt", "does")
            raise HandshakeError(
                f"{self.peer} belongs to this job, but this side {this} and the other {other}: "
                "give both the same tls= and the same spelling of the address"
            )

    def hang_up(self) -> None:
        """Have `meet` end soon, in its own thread."""
        hang_up(self._sock)

    def close(self) -> None:
        """Give the descriptor back."""
        self._sock.close()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
