"""A log of one call's collectives and their results, so that a standby can follow the call.

    first replica   set-up | listen | step | listen | step ...    appends the results
    standby         set-up | listen |      | listen |      ...    reads them, and skips steps

The writer never waits for a reader. Only the end of a step is logged: a standby that takes over
gets the weights from the first replica.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.cluster.sockets import readable
from stratagem.wire.collective import Collective
from stratagem.wire.mailboxes import WORDS, Mailboxes
from stratagem.wire.segment import Segment
from stratagem.wire.tree import decode, encode

TURN = 8  # a meeting advances the turn by 8; the low bits hold its kind
KINDS = ("step", "barrier", "gather", "broadcast", "table")
#: kind, turn and mailbox after the operation, and number of bytes that follow
_HEAD = struct.Struct(">BQBQ")
#: turn to begin at, bytes of state, and bytes of the segment handle that follows
_ORDER = struct.Struct(">QQH")
MOST = 128 << 20  # bytes of a log; beyond that the call goes on without one
_LOOK = 0.05  # seconds between two reads of a log that has nothing new
_READY = b"r"


class CollectiveLog:
    """The writer, on the first replica; created between two operations."""

    def __init__(self, turn: int, box: int) -> None:
        self.start = (turn, box)
        #: the turn at which the current step began; None between steps
        self.opened: int | None = None
        #: returns the first replica's state during a step; None while no standby can follow
        self.state: Callable[[], Any] | None = None
        #: whether an operation was not logged, so that no standby can follow any more
        self.broken = False
        #: segments of tables, kept as long as a standby may map them
        self.tables: list[Segment] = []
        self._size = 0
        self._fd = os.memfd_create("stratagem", os.MFD_CLOEXEC)
        self.handle = f"/proc/{os.getpid()}/fd/{self._fd}"
        weakref.finalize(self, os.close, self._fd)

    @property
    def writes(self) -> bool:
        """Whether operations are logged now."""
        return self.opened is None and not self.broken

    def write(self, kind: str, turn: int, box: int, data: Tensor | None = None) -> None:
        """Log an operation's result, and the collective's turn and mailbox after it."""
        length = 0 if data is None else data.numel()
        self._size += _HEAD.size + length
        if self._size > MOST:
            self.give_up()
            return
        head = _HEAD.pack(KINDS.index(kind), turn, box, length)
        if data is None:
            os.write(self._fd, head)
            return
        content: Any = data.numpy()
        left = memoryview(content)[max(0, os.writev(self._fd, [head, content]) - _HEAD.size) :]
        while left:
            left = left[os.write(self._fd, left) :]

    def give_up(self) -> None:
        """Stop logging: no standby can follow this call."""
        self.broken, self.state = True, None
        self.tables.clear()
        os.ftruncate(self._fd, 0)

    def order(self, turn: int) -> tuple[bytes, Segment]:
        """Return the order to take over the current step, and the segment that holds the state."""
        assert self.state is not None
        data = encode(self.state())
        segment = Segment(data.numel())
        segment.tensor(torch.uint8, data.shape).copy_(data)
        handle = segment.handle.encode()
        return _ORDER.pack(turn, data.numel(), len(handle)) + handle, segment


class LoggedCollective(Collective):
    """A collective that counts its meetings, and may log its operations."""

    #: on the first replica: the log that standbys follow
    log: CollectiveLog | None = None
    _turn: int
    _mail: Mailboxes
    _flags: memoryview

    def _note(self, kind: str, data: Callable[[], Tensor] | None = None) -> None:
        if self.log is not None and self.log.writes:
            self.log.write(kind, self._turn, self._mail.box, data and data())

    @property
    def position(self) -> tuple[int, int]:
        """The turn of this replica's last meeting, and the mailbox used last."""
        return self._turn, self._mail.box

    def turn_of(self, rank: int) -> int:
        """Return the turn of a replica's last meeting."""
        return self._flags[rank * WORDS] // TURN * TURN

    def step(self, work: Callable[[], None]) -> bool:
        if self.log is not None:
            self.log.opened = self._turn
        work()
        if self.log is not None:
            self.log.opened = None
            self._note("step")
        return True

    def offer(self, state: Callable[[], Any] | None, adopt: Callable[[Any], None]) -> None:
        if self.log is not None and state is None:
            self.log.give_up()
        elif self.log is not None and not self.log.broken:
            self.log.state = state


def is_ready(orders: socket.socket) -> bool:
    """Whether the standby at the other end has caught up."""
    if not readable([orders], 0):
        return False
    return orders.recv(1, socket.MSG_PEEK) == _READY


@dataclass
class LogEntry:
    """The result of one operation, and the turn and mailbox after it."""

    kind: str
    turn: int
    box: int
    data: Tensor


@dataclass
class TakeOver:
    """An order: the turn at which a standby takes over, and the first replica's state there."""

    turn: int
    state: Any


class LogFollower:
    """The standby's side of the log; orders come over a socket."""

    def __init__(self, handle: str, orders: socket.socket) -> None:
        self._fd = os.open(handle, os.O_RDONLY)
        self._at = 0
        self._orders, self._is_ready = orders, False
        self.order: TakeOver | None = None
        weakref.finalize(self, os.close, self._fd)

    def next(self) -> LogEntry | None:
        """Return the next entry, or None if it is not written yet."""
        left = os.fstat(self._fd).st_size - self._at - _HEAD.size
        if left < 0:
            return None
        kind, turn, box, length = _HEAD.unpack(os.pread(self._fd, _HEAD.size, self._at))
        if left < length:
            return None
        data = torch.empty(length, dtype=torch.uint8)
        content: Any = data.numpy()
        room, at = memoryview(content), self._at + _HEAD.size
        while room:
            got = os.preadv(self._fd, [room], at)
            room, at = room[got:], at + got
        self._at = at
        return LogEntry(KINDS[kind], turn, box, data)

    def wait(self, *, ready: bool) -> None:
        """Wait a while for a new entry or an order; `ready`: this standby can take one."""
        if ready and not self._is_ready:
            self._is_ready = True
            self._orders.sendall(_READY)
        if self.order is not None:
            time.sleep(0.001)  # the entries before the order are on their way
        elif readable([self._orders], _LOOK):
            turn, size, length = _ORDER.unpack(self._receive(_ORDER.size))
            segment = Segment.attach(self._receive(length).decode())
            self.order = TakeOver(turn, decode(segment.tensor(torch.uint8, (size,))))

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._orders.recv(size - len(data))
            if not piece:
                raise ConnectionError("the first replica has ended, or needs no standby")
            data += piece
        return data
