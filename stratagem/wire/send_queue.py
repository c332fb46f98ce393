"""Large answers over one line, one after the other.

Streams that leave at once share the line, and all of them arrive when the last one does. One after
the other each has the whole line; the last arrives no later, and those before it have begun to
compute, and to send in the other direction, which lay idle before.

    at once     a......  b......  c......      a b c compute, then all push at once
    in turn     a..b..c..                      a pushes while c still fetches

Who does not read, or reads slowly, is overtaken. On one machine, and where it is processors that
hold streams up and not the line, nobody waits for anybody.
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

LARGE = 1 << 18  # bytes; less than that is gone before another would have had its turn
STILL = 0.25  # seconds after which it is seen how much has arrived
_LONG = 0.02  # seconds of a turn that says how fast the line is
_SLOW = 0.5  # of what the line has carried for others: whoever reads more slowly is overtaken
_UNSENT = 1 << 17  # bytes that the kernel takes before it can send them: what it has is no turn's
_BUSY = 0.6  # of a turn spent by this processor: the line would carry more than one stream
_SURE = 4  # such turns in a row after which there are no more
_TELLING = 1 << 22  # bytes of a turn that says something of that: a small one goes into buffers
#: where Linux says how many bytes the peer has acknowledged
_ACKNOWLEDGED = struct.Struct("@Q")
_AT = 120


class TurnRule:
    """Who waits for a turn and who may begin: of real servers, and of simulated ones."""

    def __init__(self, at_once: float = 1) -> None:
        #: how many may send at a time
        self.at_once = at_once
        self._in_vain = 0

    def waits(self, size: float) -> bool:
        """Whether so many bytes are for a turn at all."""
        return size >= LARGE and self._in_vain < _SURE

    def may_begin(self, sending: int) -> bool:
        """Whether another may, besides those who send and are not overtaken."""
        return sending < self.at_once

    def note(self, size: float, took: float, worked: float) -> None:
        """A turn took so many seconds, of which a processor has worked so many."""
        in_vain = size >= _TELLING and worked > _BUSY * took
        self._in_vain = self._in_vain + 1 if in_vain else 0


def is_overtaken(arrived: float, seconds: float, least: float = 0.0) -> bool:
    """Whether nobody waits any longer for one of whose bytes so many arrived in so many seconds.

    least   bytes a second that are enough, if it is more than none at all
    """
    return seconds >= STILL and arrived <= least * seconds


class SendQueue(TurnRule):
    """Of all who send over one line."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._queue: deque[_Turn] = deque()
        self._sending: list[_Turn] = []
        #: bytes a second of the quickest of late
        self._best = 0.0
        #: those who were overtaken; nobody waits for them any more
        self._slow: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    @contextmanager
    def turn(self, sock: socket.socket, size: int) -> Iterator[None]:
        """Wait for a turn to send so many bytes, and have it until they are sent."""
        if not self.waits(size) or not _shares_a_line(sock):
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
                if not _shares_a_line(turn.sock):
                    break  # it was closed: whoever sends will find that
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
        """Bytes a second under which one is overtaken; all who send share the line."""
        return _SLOW * self._best / max(self.at_once, len(self._sending))

    def _until_next_look(self) -> float:
        now = time.monotonic()
        looks = [turn.since + STILL - now for turn in self._sending if not turn.overtaken]
        return min(max(0.001, min(looks)), STILL) if looks else STILL


class _Turn:
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
        """Bytes that have arrived since it began."""
        return max(0, _arrived(self.sock) - self._first)

    def moves(self, least: float) -> bool:
        """Whether as many bytes a second arrive as on others' turns, and not none at all."""
        now = time.monotonic()
        seconds = now - self.since
        if not self.overtaken and seconds >= STILL:
            seen = _arrived(self.sock)
            self.overtaken = is_overtaken(seen - self._seen, seconds, least)
            self._seen, self.since = seen, now
        return not self.overtaken


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
