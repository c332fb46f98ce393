"""Sends large answers over one network link one after the other.

Streams that are sent at once share the link, and all arrive when the last one does. One after the
other, each has the whole link: the last arrives no later, and the workers before it already compute
and send in the other direction, which would lie idle otherwise.

    at once     a......  b......  c......      a b c compute, then all push at once
    in turn     a..b..c..                      a pushes while c still fetches

A peer that does not read, or reads slowly, is overtaken. There are no turns on one machine, nor
where processors and not the link limit the streams.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

LARGE = 1 << 18  # bytes; smaller messages take no turn
STILL = 0.25  # seconds between two checks of how much has arrived
_LONG = 0.02  # seconds of a turn that is long enough to measure the link's rate
_SLOW = 0.5  # of the link's best rate: a slower peer is overtaken
_UNSENT = 1 << 17  # bytes that the kernel may buffer unsent
_BUSY = 0.6  # of a turn spent computing: the processor is the limit, not the link
_SURE = 4  # such turns in a row after which turns are given up
_CONCLUSIVE = 1 << 22  # bytes of a turn that shows the limit: a smaller one fits into buffers
#: the bytes that the peer has acknowledged, in Linux's tcp_info
_ACKNOWLEDGED = struct.Struct("@Q")
_AT = 120


class TurnRule:
    """Decides who waits for a turn and who may begin, for real and simulated servers."""

    def __init__(self, at_once: float = 1) -> None:
        #: how many streams may send at a time
        self.at_once = at_once
        self._in_vain = 0

    def waits(self, size: float) -> bool:
        """Whether a message of this size takes a turn."""
        return size >= LARGE and self._in_vain < _SURE

    def may_begin(self, sending: int) -> bool:
        """Whether another stream may begin besides `sending` that are not overtaken."""
        return sending < self.at_once

    def note(self, size: float, took: float, worked: float) -> None:
        """Record that a turn took `took` seconds, `worked` of them computing."""
        in_vain = size >= _CONCLUSIVE and worked > _BUSY * took
        self._in_vain = self._in_vain + 1 if in_vain else 0


def is_overtaken(arrived: float, seconds: float, least: float = 0.0) -> bool:
    """Whether a stream of which `arrived` bytes arrived in `seconds` is overtaken.

    least   the bytes a second below which it is
    """
    return seconds >= STILL and arrived <= least * seconds


class SendQueue(TurnRule):
    """The queue of all streams over one link."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._queue: deque[_Turn] = deque()
        self._sending: list[_Turn] = []
        #: the best recent rate, in bytes a second
        self._best = 0.0
        #: connections that were overtaken, for which no stream waits
        self._slow: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    @contextmanager
    def turn(self, sock: socket.socket, size: int) -> Iterator[None]:
        """Wait for a turn to send `size` bytes, and hold it until they are sent."""
        if not self.waits(size) or not _uses_link(sock):
            yield
            return
        turn = _Turn(sock)
        self._wait(turn)
        begun, worked = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took, worked = time.perf_counter() - begun, time.thread_time() - worked
            self._end(turn, size, took, worked)

    def _wait(self, turn: _Turn) -> None:
        with self._changed:
            turn.overtaken = turn.sock in self._slow
            self._queue.append(turn)
            while not turn.overtaken and (
                self._queue[0] is not turn or not self.may_begin(self._busy())
            ):
                self._changed.wait(self._until_next_look())
                if not _uses_link(turn.sock):
                    break  # it was closed, and sending will fail
            self._queue.remove(turn)
            turn.begin()
            self._sending.append(turn)
            self._changed.notify_all()

    def _end(self, turn: _Turn, size: int, seconds: float, worked: float) -> None:
        with self._changed:
            self.note(size, seconds, worked)
            rate = turn.arrived / seconds if seconds >= _LONG else 0.0
            self._best = max(rate, 0.95 * self._best)
            if rate > self._least():
                self._slow.discard(turn.sock)
            elif turn.overtaken:
                self._slow.add(turn.sock)
            self._sending.remove(turn)
            self._changed.notify_all()

    def _busy(self) -> int:
        least = self._least()
        return sum(turn.moves(least) for turn in self._sending)

    def _least(self) -> float:
        """Return the rate below which a stream is overtaken; all that send share the link."""
        return _SLOW * self._best / max(self.at_once, len(self._sending))

    def _until_next_look(self) -> float:
        now = time.monotonic()
        looks = [turn.since + STILL - now for turn in self._sending if not turn.overtaken]
        return min(max(0.001, min(looks)), STILL) if looks else STILL


class _Turn:
    """One stream's turn, and how much of it has arrived."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.overtaken = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self.begin()

    def begin(self) -> None:
        self._first = self._seen = _arrived(self.sock)
        self.since = time.monotonic()

    @property
    def arrived(self) -> int:
        """Bytes that have arrived since the turn began."""
        return max(0, _arrived(self.sock) - self._first)

    def moves(self, least: float) -> bool:
        """Whether bytes arrive fast enough, at more than `least` a second."""
        now = time.monotonic()
        seconds = now - self.since
        if not self.overtaken and seconds >= STILL:
            seen = _arrived(self.sock)
            self.overtaken = is_overtaken(seen - self._seen, seconds, least)
            self._seen, self.since = seen, now
        return not self.overtaken


def _uses_link(sock: socket.socket) -> bool:
    """Whether a socket leads to another machine, and Linux counts the acknowledged bytes."""
    if sock.family == getattr(socket, "AF_UNIX", None) or not hasattr(socket, "TCP_NOTSENT_LOWAT"):
        return False
    try:
        return bool(sock.getpeername()[0] != sock.getsockname()[0] and _arrived(sock) >= 0)
    except OSError:
        return False  # it is closed, and sending will fail


def _arrived(sock: socket.socket) -> int:
    """Return the bytes that the peer has acknowledged; -1 if unknown."""
    if not hasattr(socket, "TCP_INFO"):
        return -1
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _ACKNOWLEDGED.size)
    except OSError:
        return -1
    if len(info) < _AT + _ACKNOWLEDGED.size:
        return -1
    return int(_ACKNOWLEDGED.unpack_from(info, _AT)[0])
