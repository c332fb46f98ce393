"""Byte messages over a process group: a short one travels together with its size.

    [ size | number of messages | the bytes, if few ]        otherwise they follow in a second one

The first member may hold back its broadcasts and send them as one: they need no answer, and the
other members read them one by one, in order.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from stratagem.wire.process_group import ProcessGroup

_HEAD = 16  # bytes: two whole numbers
_SHORT = 1024 - _HEAD
#: a longer message is not copied to travel with others
_LONG = 1 << 20


class ByteMessages:
    """The messages of one group, whose members send and receive in the same order."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        #: on the first member: messages held back; None while none are to be
        self._held: list[Tensor] | None = None
        #: on other members: messages that came with an earlier one
        self._heard: deque[Tensor] = deque()

    def hold(self) -> None:
        """Hold back the first member's broadcasts until `tell`, or until it waits for members."""
        if self._group.rank == 0 and self._held is None:
            self._held = []

    def tell(self) -> None:
        """Send what was held back, and hold back no more."""
        self.flush()
        self._held = None

    def flush(self) -> None:
        """Send what was held back, before this member waits for those who need it."""
        if self._held:
            held, self._held = self._held, []
            self._send(held, 0)

    def barrier(self) -> None:
        """Wait for all members."""
        self.flush()
        self._group.gather(torch.zeros(1, dtype=torch.uint8))

    def gather(self, data: Tensor) -> list[Tensor]:
        """Gather every member's bytes, in rank order."""
        self.flush()
        found = self._group.gather(_first(data, 1))
        sizes = [_read(each)[0] for each in found]
        start = _HEAD
        if max(sizes) > _SHORT:
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: data.numel()].copy_(data)
            found, start = self._group.gather(padded), 0
        both = zip(found, sizes, strict=True)
        return [each[start : start + size].clone() for each, size in both]

    def broadcast(self, data: Tensor | None, source: int) -> Tensor:
        """Return the source's bytes."""
        if self._group.rank == source:
            assert data is not None
            if self._held is not None and data.numel() <= _LONG:
                self._held.append(data.clone())
                return data
            self.flush()
            self._send([data], source)
            return data
        self.flush()
        if source == 0 and self._heard:
            return self._heard.popleft()
        found, *more = self._receive(source)
        self._heard += more
        return found

    def _send(self, messages: list[Tensor], source: int) -> None:
        data = messages[0]
        if len(messages) > 1:
            sizes = torch.tensor([each.numel() for each in messages])
            data = torch.cat([sizes.view(torch.uint8), *messages])
        self._group.broadcast(_first(data, len(messages)), source)
        if data.numel() > _SHORT:
            self._group.broadcast(data, source)

    def _receive(self, source: int) -> list[Tensor]:
        first = torch.empty(_HEAD + _SHORT, dtype=torch.uint8)
        self._group.broadcast(first, source)
        size, count = _read(first)
        data = first[_HEAD : _HEAD + size]
        if size > _SHORT:
            data = torch.empty(size, dtype=torch.uint8)
            self._group.broadcast(data, source)
        if count == 1:
            return [data]
        sizes = data[: 8 * count].clone().view(torch.int64).tolist()
        return [each.clone() for each in torch.split(data[8 * count :], sizes)]


def _first(data: Tensor, count: int) -> Tensor:
    """Return the first message: the sizes, and the bytes if they are few."""
    first = torch.zeros(_HEAD + _SHORT, dtype=torch.uint8)
    first[:_HEAD].copy_(torch.tensor([data.numel(), count]).view(torch.uint8))
    if data.numel() <= _SHORT:
        first[_HEAD : _HEAD + data.numel()].copy_(data)
    return first


def _read(first: Tensor) -> tuple[int, int]:
    size, count = first[:_HEAD].view(torch.int64).tolist()
    return int(size), int(count)
