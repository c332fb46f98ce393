"""Length-framed bytes between a process and the followers it started."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct(">Q")


def send(
    sock: socket.socket, data: bytes, watch: Callable[[], None] = lambda: None
) -> None:
    """A whole message; `watch` is called while the other side does not read, and may raise."""
    sock.sendall(_LENGTH.pack(len(data)))
    rest = memoryview(data)
    while rest:
        if select.select([], [sock], [], 0.2)[1]:
            with contextlib.suppress(BlockingIOError):
                rest = rest[sock.send(rest, socket.MSG_DONTWAIT) :]
        else:
            watch()


def receive(sock: socket.socket) -> bytes | None:
    """The next message, or None when the other side is gone."""
    head = _exactly(sock, _LENGTH.size)
    return None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])


class Inbox:
    """Messages of one socket, for a reader who will not wait for ever in the middle of one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._expect(_LENGTH.size, body=False)

    def _expect(self, size: int, *, body: bool) -> None:
        self._data, self._filled, self._body = bytearray(size), 0, body

    def receive(self, watch: Callable[[], None]) -> bytes | None:
        """The next message, or None when the other side is gone.

        `watch` is called while nothing comes. If it raises, what has come is kept, and the next
        call goes on from there.
        """
        if not self._body:
            if not self._fill(watch):
                return None
            self._expect(_LENGTH.unpack(self._data)[0], body=True)
        if not self._fill(watch):
            return None
        data = bytes(self._data)
        self._expect(_LENGTH.size, body=False)
        return data

    def _fill(self, watch: Callable[[], None]) -> bool:
        while self._filled < len(self._data):
            if not select.select([self._sock], [], [], 0.2)[0]:
                watch()
                continue
            count = _read(self._sock, memoryview(self._data)[self._filled :])
            if count == 0:
                return False
            self._filled += count
        return True


def send_with_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    """A message with open descriptors attached (Unix sockets)."""
    socket.send_fds(sock, [_LENGTH.pack(len(data))], fds)
    sock.sendall(data)


def receive_with_fds(sock: socket.socket, most: int) -> tuple[bytes | None, list[int]]:
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, most)
    if len(head) < _LENGTH.size:
        return None, fds
    return _exactly(sock, _LENGTH.unpack(head)[0]), fds


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = _read(sock, view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(data)


def _read(sock: socket.socket, into: memoryview) -> int:
    """How much came; 0 if the other side is gone, which may have left without hearing us out."""
    try:
        return sock.recv_into(into)
    except ConnectionResetError:
        return 0
