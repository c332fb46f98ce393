"""Measure a connection between two tasks, and answer one that measures."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass

from stratagem.cluster.handshake import prove, recv_note, send_note
from stratagem.errors import HandshakeError

GREETING = 5.0  # seconds for the handshake
PROGRESS = 10.0  # seconds in which something must have moved
ROUND_TRIPS = 20
MOST_BYTES = 4 << 30  # that a peer may ask for

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Speed:
    """What a connection can do: seconds there and back, bytes a second each way."""

    latency: float
    up: float
    down: float


def introduce(sock: socket.socket, secret: bytes, me: str) -> dict[str, object]:
    """Prove, say that this is a check, and return what the other side says of itself."""
    prove(sock, secret, server=False, limit=GREETING)
    send_note(sock, {"purpose": "check", "from": me}, limit=GREETING)
    return recv_note(sock, limit=GREETING)


def measure(sock: socket.socket, size: int) -> Speed:
    """Measure the connection to a peer that runs `answer`, and take leave of it."""
    trips = [_ping(sock) for _ in range(ROUND_TRIPS)]
    latency = statistics.median(trips)
    up = _timed_up(sock, size)
    down = _timed_down(sock, size)
    send_note(sock, {"ask": "done"}, limit=PROGRESS)
    # One way of the acknowledgement is no transfer, but a fast link measures below its latency.
    return Speed(latency, *(size / max(t - latency / 2, t / 2, 1e-9) for t in (up, down)))


def _ping(sock: socket.socket) -> float:
    start = time.perf_counter()
    send_note(sock, {"ask": "ping"}, limit=PROGRESS)
    recv_note(sock, limit=PROGRESS)
    return time.perf_counter() - start


def _timed_up(sock: socket.socket, size: int) -> float:
    start = time.perf_counter()
    send_note(sock, {"ask": "take", "bytes": size}, limit=PROGRESS)
    _pour(sock, size)
    recv_note(sock, limit=PROGRESS)
    return time.perf_counter() - start


def _timed_down(sock: socket.socket, size: int) -> float:
    start = time.perf_counter()
    send_note(sock, {"ask": "give", "bytes": size}, limit=PROGRESS)
    _drain(sock, size)
    return time.perf_counter() - start


def answer(conn: socket.socket, secret: bytes, me: str) -> str:
    """Answer one check to its end; return the task that it came from ("" if it is none)."""
    prove(conn, secret, server=True, limit=GREETING)
    hello = recv_note(conn, limit=GREETING)
    if hello.get("purpose") != "check":
        # A task that already trains meets us instead of its chief: it will knock again.
        send_note(conn, {"again": f"`stratagem check` still runs as {me}"}, limit=PROGRESS)
        return ""
    send_note(conn, {"check": me}, limit=PROGRESS)
    while True:
        note = recv_note(conn, limit=PROGRESS * 3)
        if note.get("ask") == "done":
            return str(hello.get("from", ""))
        _serve(conn, note)


def _serve(conn: socket.socket, note: dict[str, object]) -> None:
    ask = note.get("ask")
    if ask == "ping":
        send_note(conn, {}, limit=PROGRESS)
        return
    size = note.get("bytes")
    if ask not in ("take", "give") or not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
        raise HandshakeError(f"it asked for {ask!r}, {size!r} bytes: not the same stratagem?")
    if ask == "take":
        _drain(conn, size)
        send_note(conn, {}, limit=PROGRESS)
    else:
        _pour(conn, size)


def _pour(sock: socket.socket, size: int) -> None:
    """Send `size` bytes of nothing."""
    sock.settimeout(PROGRESS)
    block = memoryview(bytes(_BLOCK))
    while size > 0:
        size -= sock.send(block[: min(size, _BLOCK)])


def _drain(sock: socket.socket, size: int) -> None:
    """Receive `size` bytes into one small block, over and over."""
    sock.settimeout(PROGRESS)
    block = memoryview(bytearray(_BLOCK))
    while size > 0:
        taken = sock.recv_into(block[: min(size, _BLOCK)])
        if taken == 0:
            raise ConnectionResetError("it hung up in the middle of a measurement")
        size -= taken
