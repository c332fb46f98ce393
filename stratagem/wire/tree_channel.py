"""Messages from one member of a collective to another, first in, first out.

On the CPUs of one machine they lie in slots of shared memory (wire/slots.py); elsewhere they travel
by Gloo's send and receive, through the memory of the hosts:

    sender     length, then the bytes of a tree, in a thread behind the messages before it
    receiver   takes memory for so many, and looks after the other side while it waits
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
        """What `take` returned is not read any more."""


def open_channels(
    collective: Collective, pairs: Sequence[tuple[int, int]], slots: int
) -> Sequence[TreeChannel]:
    """A channel for each pair of a sender and a receiver. Collective.

    `slots`: how many messages lie in shared memory before a sender waits.
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
    """Between hosts, and wherever memory is not shared."""

    def __init__(self, collective: TorchCollective, sender: int, receiver: int, tag: int) -> None:
        self._collective, self._group, self._tag = collective, collective.messages, tag
        self.sender, self.receiver = sender, receiver
        self._sent: BackgroundWork | None = None

    def post(self, tree: Tree) -> None:
        """Send without waiting for the receiver; a failure of the message before it is raised."""
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
    """From a member to itself, which Gloo does not carry."""

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
