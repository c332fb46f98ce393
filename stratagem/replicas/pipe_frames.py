"""Messages between a process and the followers it started: frames that have only a body."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from stratagem.cluster.framing import HEAD, FrameReader, encode
from stratagem.cluster.sockets import readable, writable


def send(sock: socket.socket, data: bytes, watch: Callable[[], None] = lambda: None) -> None:
    """Send a message; `watch` is called while the receiver does not read, and may raise."""
    sock.sendall(encode({}, len(data)))
    rest = memoryview(data)
    while rest:
        if writable(sock, 0.2):
            with contextlib.suppress(BlockingIOError):
                rest = rest[sock.send(rest, socket.MSG_DONTWAIT) :]
        else:
            watch()


def receive(sock: socket.socket) -> bytes | None:
    """Receive the next message; None if the peer is gone."""
    return PipeReader(sock).receive()


class PipeReader:
    """Receives the messages of one socket, and can be interrupted in the middle of one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.frames = sock, FrameReader()

    def receive(self, watch: Callable[[], None] | None = None) -> bytes | None:
        """Receive the next message; None if the peer is gone.

        `watch` is called while no data comes. If it raises, the data so far is kept, and the next
        call goes on from there.
        """
        while True:
            if watch is not None and not readable([self._sock], 0.2):
                watch()
                continue
            try:
                count = self._sock.recv_into(self.frames.room)
            except ConnectionResetError:
                return None  # the peer has left without reading all that was sent
            if not count:
                return None
            if (frame := self.frames.filled(count)) is not None:
                return frame[1]


def send_with_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    """Send a message with open file descriptors attached (Unix sockets)."""
    socket.send_fds(sock, [encode({}, len(data))], fds)
    sock.sendall(data)


def receive_with_fds(sock: socket.socket, most: int) -> tuple[bytes | None, list[int]]:
    """Receive the next message and its descriptors; None for the message if the peer is gone."""
    try:
        head, fds, _, _ = socket.recv_fds(sock, HEAD.size, most)
    except ConnectionResetError:
        return None, []
    reader = PipeReader(sock)
    list(reader.frames.feed(head))  # yields no frame: a head alone is none
    return (reader.receive() if head else None), fds
