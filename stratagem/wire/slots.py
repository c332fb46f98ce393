"""Messages between two processes through slots of shared memory.

    sender     writes shape, type and bytes into the next free slot, then counts it as posted
    receiver   reads them in place, then counts the slot as taken

A slot is a segment of the sender that grows as needed; its handle is in the channel's control
words, so that the receiver maps it again when it has changed. Messages are first in, first out; a
sender waits for a free slot.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from stratagem.figures.meter import METER
from stratagem.wire.segment import Segment, aligned
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.tree import Tree, outlined, rebuilt

_COUNTS = 16  # words: posted, then taken, each in its own cache line
_SLOT = 16  # words a slot: length of the handle, length of the outline, the handle
_HANDLE = (_SLOT - 2) * 8  # bytes


def channel_words(slots: int) -> int:
    """Return the 64-bit words of control memory that a channel needs."""
    return _COUNTS + slots * _SLOT


class SlotChannel:
    """One direction between two members of a collective; `sender` and `receiver` are ranks."""

    def __init__(
        self,
        collective: SharedMemoryCollective,
        words: memoryview,
        sender: int,
        receiver: int,
        slots: int,
    ) -> None:
        self._collective, self._words = collective, words
        self.sender, self.receiver, self._slots = sender, receiver, slots
        self._own: list[Segment | None] = [None] * slots
        self._mapped: dict[int, Segment] = {}

    def post(self, tree: Tree) -> None:
        """Send a tree of tensors, numbers and text; blocks while all slots are full."""
        words = self._words
        number = words[0]
        self._collective.wait_for(self.receiver, lambda: number - words[8] < self._slots)
        outline, tensors = outlined(tree)
        raw = json.dumps(outline).encode()
        starts = [aligned(len(raw))]
        for tensor in tensors:
            starts.append(starts[-1] + aligned(tensor.nbytes))
        segment = self._room(number % self._slots, starts[-1])
        segment.memory[: len(raw)] = raw
        words[_COUNTS + (number % self._slots) * _SLOT + 1] = len(raw)
        for tensor, start in zip(tensors, starts, strict=False):
            place = segment.tensor(tensor.dtype, tensor.shape, start)
            place.copy_(tensor.detach())
        METER.bytes += starts[-1]
        self._collective.order_writes()
        words[0] = number + 1

    def take(self) -> Tree:
        """Wait for the next message; its tensors are valid until `release`."""
        words = self._words
        number = words[8]
        self._collective.wait_for(self.sender, lambda: words[0] > number)
        self._collective.order_writes()
        at = _COUNTS + (number % self._slots) * _SLOT
        segment = self._map(number % self._slots, bytes(self._text(at, words[at])))
        outline = json.loads(segment.memory[: words[at + 1]])
        start = aligned(words[at + 1])

        def tensor(dtype: torch.dtype, shape: list[int]) -> Tensor:
            nonlocal start
            found = segment.tensor(dtype, shape, start)
            start += aligned(found.nbytes)
            return found

        return rebuilt(outline, tensor)

    def release(self) -> None:
        """Free the slot of the message that `take` returned."""
        self._collective.order_writes()
        self._words[8] += 1

    def _room(self, slot: int, size: int) -> Segment:
        segment = self._own[slot]
        if segment is None or segment.size < size:
            segment = self._own[slot] = Segment(size)
            at = _COUNTS + slot * _SLOT
            raw = segment.handle.encode()
            assert len(raw) <= _HANDLE
            self._words[at] = len(raw)
            self._text(at, len(raw))[:] = raw
        return segment

    def _map(self, slot: int, handle: bytes) -> Segment:
        known = self._mapped.get(slot)
        if known is None or known.handle != handle.decode():
            known = self._mapped[slot] = Segment.attach(handle.decode())
        return known

    def _text(self, at: int, length: int) -> memoryview:
        return self._words[at + 2 : at + _SLOT].cast("B")[:length]
