"""Byte messages between replicas of one machine: two boxes a sender in shared memory, in turn.

One meeting a message is enough: a replica that comes to the next meeting has read this box, which
is only written again for the message after the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stratagem.wire.segment import Segment

#: one cache line of flags per replica, in 64-bit words: the collective's turn, the sizes of the
#: messages in both boxes, and the lengths of the handles in them
WORDS = 8
_SIZE, _HANDLE = 1, 3
_INLINE = 1 << 16  # bytes of a message that fit into a box; larger ones get their own segment


class Mailboxes:
    """The boxes of all replicas, behind the flags in the segment that all replicas map."""

    def __init__(self, rank: int, size: int, control: Segment, flags: memoryview) -> None:
        self._rank, self._flags = rank, flags
        start = size * WORDS * 8
        self._boxes = [
            [
                control.tensor(torch.uint8, (_INLINE,), start + (2 * r + box) * _INLINE)
                for box in (0, 1)
            ]
            for r in range(size)
        ]
        self._large: list[Segment | None] = [None, None]
        self._mapped: dict[tuple[int, int], Segment] = {}
        #: the box used last
        self.box = 0

    @staticmethod
    def size_for(replicas: int) -> int:
        """Return the bytes that the boxes of this many replicas take."""
        return replicas * 2 * _INLINE

    def next_box(self) -> int:
        """Switch to the other box, on every replica alike."""
        self.box ^= 1
        return self.box

    def post(self, data: Tensor, box: int) -> None:
        """Write a message into a box, or a large one into a segment that grows as needed."""
        size = data.numel()
        self._flags[self._rank * WORDS + _SIZE + box] = size
        if size <= _INLINE:
            self._boxes[self._rank][box][:size].copy_(data)
            return
        segment = self._large[box]
        if segment is None or segment.size < size:
            segment = self._large[box] = Segment(size + size // 4)
        segment.tensor(torch.uint8, (size,)).copy_(data)
        self.write_handle(segment.handle, box)

    def fetch(self, rank: int, box: int) -> Tensor:
        """Return a view of the message; its sender overwrites it after two more meetings."""
        size = self._flags[rank * WORDS + _SIZE + box]
        if size <= _INLINE:
            return self._boxes[rank][box][:size]
        handle = self.read_handle(rank, box)
        known = self._mapped.get((rank, box))
        if known is None or known.handle != handle:
            known = self._mapped[rank, box] = Segment.attach(handle)
        return known.tensor(torch.uint8, (size,))

    def write_handle(self, text: str, box: int) -> None:
        """Write the handle of a segment into a box."""
        raw = text.encode()
        self._flags[self._rank * WORDS + _HANDLE + box] = len(raw)
        self._boxes[self._rank][box][: len(raw)].copy_(
            torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        )

    def read_handle(self, rank: int, box: int) -> str:
        length = self._flags[rank * WORDS + _HANDLE + box]
        return self._boxes[rank][box][:length].numpy().tobytes().decode()

    def forget(self) -> None:
        """Free the memory of large messages, which all replicas have read."""
        self._large = [None, None]
        self._mapped.clear()
