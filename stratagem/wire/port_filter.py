"""Shut the port of a Gloo group once all its members are connected.

Gloo listens as long as the group lives, accepts any connection, and never closes it: an outsider
could use up the process' descriptors. No member connects after the start, so a packet filter drops
what arrives at that port. The socket itself is Gloo's and stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

from stratagem.wire.link_time import sockets

T = TypeVar("T")

_SO_ATTACH_FILTER = 26
_one_at_a_time = threading.Lock()
_warned = threading.Event()

log = logging.getLogger("stratagem")


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


_DROP = _Instruction(0x06, 0, 0, 0)  # return 0: keep no byte of the packet


def listening(make: Callable[[], T]) -> tuple[T, list[socket.socket]]:
    """Return the result of `make`, and duplicates of the sockets that it left listening."""
    with _one_at_a_time:
        before = set(sockets())
        made = make()
        new = [fd for name, fd in sockets().items() if name not in before]
        return made, [sock for fd in new for sock in _listener(fd)]


def shut(sockets: list[socket.socket], published: bytes) -> None:
    """Shut the sockets whose address Gloo has published; close all duplicates.

    Any other socket is a server that another thread has opened meanwhile.
    """
    program = _Program(1, ctypes.pointer(_DROP))
    with contextlib.ExitStack() as held:
        for sock in sockets:
            held.enter_context(sock)
        ours = [sock for sock in sockets if _address(sock) in published]
        try:
            for sock in ours:
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
        except OSError as problem:
            _tell_open(f"port {sock.getsockname()[1]}", str(problem))
        if not ours:
            _tell_open("a port", "which one it is cannot be seen")


def _tell_open(port: str, why: str) -> None:
    """Warn once in a process: the ports of its other groups are no different."""
    if not _warned.is_set():
        _warned.set()
        log.warning(
            "%s of Gloo stays open to anyone as long as the group lives (%s): let only the job's "
            "own machines reach this one (docs/security.md)",
            port,
            why,
        )


def _address(sock: socket.socket) -> bytes:
    """Return the start of the sockaddr that a socket listens at."""
    host, port, *_ = sock.getsockname()
    flow = b"" if sock.family == socket.AF_INET else bytes(4)
    start = struct.pack("=H", sock.family) + struct.pack(">H", port)
    return start + flow + socket.inet_pton(sock.family, host.partition("%")[0])


def _listener(fd: int) -> list[socket.socket]:
    """Return a duplicate of the socket, if it listens on a port."""
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:
        return []  # closed meanwhile
    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        return [sock]
    sock.close()
    return []
