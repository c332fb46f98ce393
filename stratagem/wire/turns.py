"""Large answers over one line, one after the other.

Streams that leave at once share the line, and all of them arrive when the last one does. One after
the other each has the whole line; the last arrives no later, and those before it have begun to
compute, and to send in the other direction, which lay idle before.

    at once     a......  b......  c......      a b c compute, then all push at once
    in turn     a..b..c..                      a pushes while c still fetches

Who does not read is overtaken. On one machine, and where it is processors that hold streams up and
not the line, nobody waits for anybody.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

LARGE = 1 << 18  # bytes; less than that is gone before another would have had its turn
_STILL = 0.25  # seconds in which something must arrive, or the next one goes, too
_UNSENT = 1 << 17  # bytes that the kernel takes before it can send them: what it has is no turn's
_BUSY = 0.6  # of a turn spent by this processor: the line would carry more than one stream
_SURE = 4  # such turns in a row after which there are no more
#: where Linux says how many bytes the peer has acknowledged
_ACKNOWLEDGED = struct.Struct("@Q")
_AT = 120


class Turns:
    """Of all who send over one line."""

    def __init__(self) -> None:
        #: how many may send at a time
        self.at_once = 1
        self._changed = threading.Condition()
        self._queue: deque[_Turn] = deque()
        self._sending: list[_Turn] = []
        self._in_vain = 0

    @contextmanager
    def turn(self, sock: socket.socket, size: int) -> Iterator[None]:
        """Wait for a turn to send so many bytes, and have it until they are sent."""
        if size < LARGE or self._in_vain >= _SURE or not _shares_a_line(sock):
            yield
            return
        turn = _Turn(sock)
        self._wait(turn)
        begun, worked = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took, worked = time.perf_counter() - begun, time.thread_time() - worked
            with self._changed:
                self._in_vain = self._in_vain + 1 if worked > _BUSY * took else 0
                self._sending.remove(turn)
                self._changed.notify_all()

    def _wait(self, turn: _Turn) -> None:
        with self._changed:
            self._queue.append(turn)
            while self._queue[0] is not turn or self._busy() >= self.at_once:
                self._changed.wait(_STILL)
            self._queue.popleft()
            turn.begin()
            self._sending.append(turn)
            self._changed.notify_all()

    def _busy(self) -> int:
        return sum(turn.moves() for turn in self._sending)


class _Turn:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)

    def begin(self) -> None:
        self._arrived, self._since = _arrived(self._sock), time.monotonic()

    def moves(self) -> bool:
        """Whether something of it has arrived since it was last looked at, if that is a while."""
        now = time.monotonic()
        if now - self._since < _STILL:
            return True
        arrived = _arrived(self._sock)
        if arrived == self._arrived:
            return False
        self._arrived, self._since = arrived, now
        return True


def _shares_a_line(sock: socket.socket) -> bool:
    """Whether it leads to another machine, and it can be seen how much has arrived there."""
    if sock.family == getattr(socket, "AF_UNIX", None) or not hasattr(socket, "TCP_NOTSENT_LOWAT"):
        return False
    try:
        return bool(sock.getpeername()[0] != sock.getsockname()[0] and _arrived(sock) >= 0)
    except OSError:
        return False  # it is closed, which whoever sends will find


def _arrived(sock: socket.socket) -> int:
    """Bytes that the peer has acknowledged; -1 where that is not known."""
    if not hasattr(socket, "TCP_INFO"):
        return -1
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _ACKNOWLEDGED.size)
    except OSError:
        return -1
    if len(told) < _AT + _ACKNOWLEDGED.size:
        return -1
    return int(_ACKNOWLEDGED.unpack_from(told, _AT)[0])
