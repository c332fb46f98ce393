"""What the operations of one call have brought, kept so that a standby can follow the call.

    first replica   set-up | listen | step | listen | step ...    appends what came of each
    standby         set-up | listen |      | listen |      ...    reads it, and leaves steps out

Nobody waits for a reader. Of a step only its end is written: what it has done to the weights, a
standby gets from the first replica when it takes part itself.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.wire.collective import Collective
from stratagem.wire.mailboxes import WORDS, Mailboxes
from stratagem.wire.segment import Segment
from stratagem.wire.tree import decode, encode

TURN = 8  # by how much a meeting advances the count; its kind rides on the rest
KINDS = ("step", "barrier", "gather", "broadcast", "table")
#: what kind, the turn and the mailbox after it, and how many bytes follow
_HEAD = struct.Struct(">BQBQ")
#: where to begin, how many bytes of state there are, and how many of their segment's handle follow
_ORDER = struct.Struct(">QQH")
MOST = 128 << 20  # bytes of a log; beyond, the call goes on without one
_LOOK = 0.05  # seconds between two looks at a log that has nothing new
_READY = b"r"


class CollectiveLog:
    """The writer's side, on the first replica; made between two operations."""

    def __init__(self, turn: int, box: int) -> None:
        self.start = (turn, box)
        #: the turn at which the step under way has begun; None between steps
        self.opened: int | None = None
        #: the first replica's state while a step is under way; None while nobody can follow
        self.state: Callable[[], Any] | None = None
        #: whether something was left out, so that nobody can follow any more
        self.broken = False
        #: those of tables, which live as long as they may be mapped
        self.tables: list[Segment] = []
        self._size = 0
        self._fd = os.memfd_create("stratagem", os.MFD_CLOEXEC)
        self.handle = f"/proc/{os.getpid()}/fd/{self._fd}"
        weakref.finalize(self, os.close, self._fd)

    @property
    def writes(self) -> bool:
        """Whether operations are to be written now."""
        return self.opened is None and not self.broken

    def write(self, kind: str, turn: int, box: int, data: Tensor | None = None) -> None:
        """An operation is over, after which the collective stands at this turn and mailbox."""
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
        """Have nobody follow this call."""
        self.broken, self.state = True, None
        self.tables.clear()
        os.ftruncate(self._fd, 0)

    def order(self, turn: int) -> tuple[bytes, Segment]:
        """What sends a standby into the step that is under way; the segment lives until it is."""
        assert self.state is not None
        data = encode(self.state())
        segment = Segment(data.numel())
        segment.tensor(torch.uint8, data.shape).copy_(data)
        handle = segment.handle.encode()
        return _ORDER.pack(turn, data.numel(), len(handle)) + handle, segment


class LoggedCollective(Collective):
    """A collective that counts its meetings, and may write down what its operations bring."""

    #: on the first replica: where operations are noted for standbys
    log: CollectiveLog | None = None
    _turn: int
    _mail: Mailboxes
    _flags: memoryview

    def _note(self, kind: str, data: Callable[[], Tensor] | None = None) -> None:
        if self.log is not None and self.log.writes:
            self.log.write(kind, self._turn, self._mail.box, data and data())

    @property
    def position(self) -> tuple[int, int]:
        """The last meeting that this replica came to, and the mailbox used last."""
        return self._turn, self._mail.box

    def turn_of(self, rank: int) -> int:
        """The last meeting that a replica came to."""
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
    if not select.select([orders], [], [], 0)[0]:
        return False
    return orders.recv(1, socket.MSG_PEEK) == _READY


@dataclass
class LogEntry:
    """What one operation has brought, and where the collective stands after it."""

    kind: str
    turn: int
    box: int
    data: Tensor


@dataclass
class TakeOver:
    """From which turn on a standby takes part, and the first replica's state at that turn."""

    turn: int
    state: Any


class LogFollower:
    """The standby's side; orders come by a socket of its own."""

    def __init__(self, handle: str, orders: socket.socket) -> None:
        self._fd = os.open(handle, os.O_RDONLY)
        self._at = 0
        self._orders, self._is_ready = orders, False
        self.order: TakeOver | None = None
        weakref.finalize(self, os.close, self._fd)

    def next(self) -> LogEntry | None:
        """The next entry, if it is there."""
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
        """There is nothing new: wait a while for it, or for an order. `ready`: one is welcome."""
        if ready and not self._is_ready:
            self._is_ready = True
            self._orders.sendall(_READY)
        if self.order is not None:
            time.sleep(0.001)  # what comes before it is on its way
        elif select.select([self._orders], [], [], _LOOK)[0]:
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
