"""Byte streams over sockets: several buffers in one call, without copies."""

from __future__ import annotations

import os
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence

_PIECES = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16


class Channel(ABC):
    """A stream of bytes over a socket. One thread may receive while another sends; only one thread
    at a time may send."""

    def __init__(self, sock: socket.socket) -> None:
        #: the socket, for queries about the connection; not for sending or receiving
        self.line = sock

    @property
    def closed(self) -> bool:
        """Whether the descriptor is closed."""
        return self.line.fileno() < 0

    @abstractmethod
    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send all pieces; OSError if the peer is gone."""

    @abstractmethod
    def receive(self, pieces: Sequence[memoryview]) -> int:
        """Fill the pieces; return the bytes received, fewer only at the stream's end."""

    @abstractmethod
    def readable(self, seconds: float) -> bool:
        """Whether a byte or the stream's end arrives within that time."""

    def hang_up(self) -> None:
        """Shut the stream down both ways, waking waiting threads; the descriptor stays."""
        hang_up(self.line)

    def close(self) -> None:
        """Close the descriptor; no thread may be using the channel any more."""
        self.line.close()


class PlainChannel(Channel):
    """A blocking stream socket, TCP or Unix, unencrypted."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        super().__init__(sock)
        self._sock = sock

    def send(self, pieces: Sequence[memoryview]) -> None:
        if len(pieces) == 1:
            self._sock.sendall(pieces[0])
            return
        left = [piece for piece in pieces if piece]
        done = 0
        while done < len(left):
            count = self._sock.sendmsg(left[done : done + _PIECES])
            done = _advance(left, done, count)

    def receive(self, pieces: Sequence[memoryview]) -> int:
        done = total = 0
        if len(pieces) == 1:  # the usual case, without a list of buffers
            total = self._sock.recv_into(pieces[0], 0, socket.MSG_WAITALL)
            if total in (0, len(pieces[0])):
                return total
            pieces = [pieces[0][total:]]
        left = [piece for piece in pieces if piece]
        while done < len(left):
            count = self._sock.recvmsg_into(left[done : done + _PIECES], 0, socket.MSG_WAITALL)[0]
            if not count:
                break
            total += count
            done = _advance(left, done, count)
        return total

    def readable(self, seconds: float) -> bool:
        return wait(self._sock, select.POLLIN, seconds)


def _advance(pieces: list[memoryview], done: int, count: int) -> int:
    """Cut `count` bytes off the front of pieces[done:], and return the new `done`."""
    while count:
        size = len(pieces[done])
        if count < size:
            pieces[done] = pieces[done][count:]
            break
        count -= size
        done += 1
    return done


def wait(sock: socket.socket, event: int, seconds: float | None = None) -> bool:
    """Wait until the socket is ready, has failed or was hung up; False after a timeout."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def hang_up(sock: socket.socket) -> None:
    """Shut a socket down both ways, also an SSLSocket.

    SSLSocket.shutdown() would first forget its keys: a thread that is about to send could then
    send in the clear.
    """
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # the peer hung up first, or it was never connected
