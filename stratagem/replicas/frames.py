"""Length-framed bytes between a process and the followers it started."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct(">Q")


def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> bytes | None:
    """The next message, or None when the other side is gone."""
    head = _exactly(sock, _LENGTH.size)
    return None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])


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
        count = sock.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(data)
