"""Bytes through a socket: many pieces of memory in one call, and nothing copied on the way."""

from __future__ import annotations

import os
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence

_PIECES = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16


class Channel(ABC):
    """A stream of bytes over a socket. One thread may receive while another sends; sends come one
    at a time."""

    def __init__(self, sock: socket.socket) -> None:
        #: to ask about the connection; not to send or receive
        self.line = sock

    @property
    def closed(self) -> bool:
        """Whether the descriptor is gone."""
        return self.line.fileno() < 0

    @abstractmethod
    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send all pieces; OSError if the peer is gone."""

    @abstractmethod
    def receive(self, pieces: Sequence[memoryview]) -> int:
        """Fill the pieces; return how many bytes came, fewer only at the stream's end."""

    @abstractmethod
    def readable(self, seconds: float) -> bool:
        """Whether a byte, or the end, comes within that time."""

    def hang_up(self) -> None:
        """End the stream both ways, waking every thread that waits on it; the descriptor stays."""
        hang_up(self.line)

    def close(self) -> None:
        """Give the descriptor back; no thread may be using the channel any more."""
        self.line.close()


class PlainChannel(Channel):
    """A stream socket as it is, TCP or Unix; it blocks."""

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
        if len(pieces) == 1:  # as most are: no list of buffers for the kernel
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
    """Cut `count` bytes off the front of pieces[done:]; the new `done`."""
    while count:
        size = len(pieces[done])
        if count < size:
            pieces[done] = pieces[done][count:]
            break
        count -= size
        done += 1
    return done


def wait(sock: socket.socket, event: int, seconds: float | None = None) -> bool:
    """Wait until the socket is ready, has failed or was hung up; False when time is over."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def hang_up(sock: socket.socket) -> None:
    """Shut a socket down both ways, whatever class it has.

    SSLSocket.shutdown() would first forget its keys: a thread that is about to send could then
    send in the clear.
    """
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # the peer was first, or it never was connected
