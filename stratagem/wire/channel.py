"""Bytes through a socket: many pieces of memory in one call, and nothing copied on the way."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from typing import Protocol

_PIECES = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16


class Channel(Protocol):
    """A stream of bytes. One thread may receive while another sends; sends come one at a time."""

    @property
    def closed(self) -> bool:
        """Whether the descriptor is gone."""

    @property
    def line(self) -> socket.socket:
        """What it goes through, for whoever asks about the line; not to send or receive."""

    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send all of it; OSError if the peer is gone."""

    def receive(self, pieces: Sequence[memoryview]) -> int:
        """Fill the pieces; how many bytes came, fewer than wanted only at the stream's end."""

    def readable(self, seconds: float) -> bool:
        """Whether something, or the end, comes within that time."""

    def hang_up(self) -> None:
        """End the stream both ways, waking whoever waits on it; the descriptor stays."""

    def close(self) -> None:
        """Give the descriptor back; nobody may be using the channel any more."""


class PlainChannel:
    """A stream socket as it is, TCP or Unix; it blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock

    @property
    def closed(self) -> bool:
        """Whether the descriptor is gone."""
        return self._sock.fileno() < 0

    @property
    def line(self) -> socket.socket:
        """What it goes through."""
        return self._sock

    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send all of it, gathered by the kernel."""
        if len(pieces) == 1:
            self._sock.sendall(pieces[0])
            return
        left = [piece for piece in pieces if piece]
        done = 0
        while done < len(left):
            count = self._sock.sendmsg(left[done : done + _PIECES])
            done = _advance(left, done, count)

    def receive(self, pieces: Sequence[memoryview]) -> int:
        """Fill the pieces, scattered by the kernel."""
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
        """Whether something, or the end, comes within that time."""
        return wait(self._sock, select.POLLIN, seconds)

    def hang_up(self) -> None:
        """End the stream both ways."""
        hang_up(self._sock)

    def close(self) -> None:
        """Give the descriptor back."""
        self._sock.close()


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
