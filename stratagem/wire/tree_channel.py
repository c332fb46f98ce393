"""Channels of messages between two members of a collective, first in, first out.

Between CPU processes of one machine they use slots of shared memory (wire/slots.py); elsewhere
Gloo's send and receive, through host memory:

    sender     sends the length, then the bytes of a tree, on a thread, after earlier messages
    receiver   allocates memory, and watches the sender while it waits
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stratagem.figures.meter import METER
from stratagem.wire.collective import Collective
from stratagem.wire.point_to_point import BackgroundWork
from stratagem.wire.process_group import ProcessGroup
from stratagem.wire.shared_memory import sharing
from stratagem.wire.slots import SlotChannel, channel_words
from stratagem.wire.torch_dist import TorchCollective
from stratagem.wire.tree import TREE_LIMIT, Tree, decode, encode


class TreeChannel(Protocol):
    """One direction between two members; `sender` and `receiver` are ranks."""

    sender: int
    receiver: int

    def post(self, tree: Tree) -> None:
        """Send a tree of tensors, numbers and text."""

    def take(self) -> Tree:
        """Wait for the next message; its tensors may be read until `release`."""

    def release(self) -> None:
        """Free the message that `take` returned."""


def open_channels(
    collective: Collective, pairs: Sequence[tuple[int, int]], slots: int
) -> Sequence[TreeChannel]:
    """Open a channel for each pair of a sender and a receiver. Collective.

    `slots`: how many messages shared memory holds before a sender blocks.
    """
    if collective.shares_memory:
        size, shared = channel_words(slots), sharing(collective)
        words = shared.table(max(len(pairs), 1) * size, torch.int64, rows=1).words()[0]
        return [
            SlotChannel(shared, words[i * size : (i + 1) * size], sender, receiver, slots)
            for i, (sender, receiver) in enumerate(pairs)
        ]
    assert isinstance(collective, TorchCollective)
    first = collective.messages.reserve_tags(len(pairs))
    return [
        OwnChannel(sender)
        if sender == receiver
        else MessageChannel(collective, sender, receiver, first + i)
        for i, (sender, receiver) in enumerate(pairs)
    ]


class MessageChannel:
    """A channel between members that do not share memory."""

    def __init__(self, collective: TorchCollective, sender: int, receiver: int, tag: int) -> None:
        self._collective, self._group, self._tag = collective, collective.messages, tag
        self.sender, self.receiver = sender, receiver
        self._sent: BackgroundWork | None = None

    def post(self, tree: Tree) -> None:
        """Send without blocking; raises if an earlier message has failed."""
        if self._sent is not None and self._sent.is_completed():
            self._collective.named(self._sent.wait)
            self._sent = None
        data = encode(tree)
        METER.bytes += data.nbytes
        work = BackgroundWork(_send, self._group, self._sent, data, self.receiver, self._tag)
        self._sent = self._group.begin(work)

    def take(self) -> Tree:
        """Wait for the next message."""
        found: list[Tensor] = []
        work = BackgroundWork(_receive, self._group, found, self.sender, self._tag)
        self._group.begin(work)
        started = METER.begin_wait()
        try:
            self._collective.named(lambda: self._group.wait_for(work, self.sender))
        finally:
            METER.end_wait(started)
        return decode(found[0])

    def release(self) -> None:
        """It has memory of its own."""


class OwnChannel:
    """A channel from a member to itself, which Gloo does not support."""

    def __init__(self, rank: int) -> None:
        self.sender = self.receiver = rank
        self._posted: deque[Tensor] = deque()

    def post(self, tree: Tree) -> None:
        self._posted.append(encode(tree))

    def take(self) -> Tree:
        return decode(self._posted.popleft())

    def release(self) -> None:
        """It has memory of its own."""


def _send(
    group: ProcessGroup, before: BackgroundWork | None, data: Tensor, to: int, tag: int
) -> None:
    if before is not None:
        before.wait()
    group.send(torch.tensor([data.numel()]), to, tag)
    group.send(data, to, tag)


def _receive(group: ProcessGroup, found: list[Any], source: int, tag: int) -> None:
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, source, tag)
    size = int(length)
    if not 0 < size <= TREE_LIMIT:
        raise ValueError(f"a message of {size} bytes was announced; {TREE_LIMIT} is the limit")
    data = torch.empty(size, dtype=torch.uint8)
    group.receive(data, source, tag)
    found.append(data)
