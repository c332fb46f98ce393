"""Messages through slots of shared memory carry shape and type, in order, and wait for room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import ReplicaLost
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.slots import SlotChannel, channel_words
from tests.clock import PATIENCE

pytestmark = pytest.mark.timeout(60)


def pair(slots: int, watch: Any = None) -> tuple[SlotChannel, SlotChannel]:
    """Return both ends of a channel in one process."""
    control = Segment(SharedMemoryCollective.control_size(2))
    words = Segment(8 * channel_words(slots)).words(channel_words(slots))
    ends = [SharedMemoryCollective(rank, 2, control, watch) for rank in (0, 1)]
    first, second = (SlotChannel(end, words, 0, 1, slots) for end in ends)
    return first, second


@pytest.fixture
def one_slot() -> Iterator[tuple[SlotChannel, SlotChannel]]:
    yield pair(1)


kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.lists(st.lists(st.tuples(kinds, shapes), max_size=3), max_size=6), st.integers(1, 3))
def test_every_message_arrives_as_it_was(messages: list[Any], slots: int) -> None:
    """Any number, shape and type of tensors, in slots that are reused and grow."""
    sender, receiver = pair(slots)
    for number, outline in enumerate(messages):
        sent = [(torch.rand(shape) * 9).to(kind) for kind, shape in outline]
        sender.post({"m": number, "values": sent, "none": None})
        told = receiver.take()
        assert told["m"] == number and told["none"] is None
        for mine, theirs in zip(sent, told["values"], strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        receiver.release()


def test_a_view_that_is_not_contiguous_travels(one_slot: Any) -> None:
    sender, receiver = one_slot
    value = torch.arange(6.0).view(2, 3).t()
    sender.post([value])
    assert torch.equal(receiver.take()[0], value)


def test_a_sender_waits_for_a_free_slot(one_slot: Any) -> None:
    sender, receiver = one_slot
    sender.post([torch.ones(3)])
    later = threading.Thread(target=lambda: sender.post([torch.zeros(3)]), daemon=True)
    later.start()
    time.sleep(0.1)
    assert later.is_alive()
    assert torch.equal(receiver.take()[0], torch.ones(3))  # not overwritten
    receiver.release()
    later.join(PATIENCE)
    assert not later.is_alive()
    assert torch.equal(receiver.take()[0], torch.zeros(3))


def test_who_waits_for_one_that_is_gone_is_told() -> None:
    def watch(rank: int, waited: float) -> None:
        raise ReplicaLost(f"replica {rank} is gone", f"replica {rank}")

    sender, receiver = pair(1, watch)
    with pytest.raises(ReplicaLost, match="replica 0 is gone"):
        receiver.take()
    sender.post([1])
    with pytest.raises(ReplicaLost, match="replica 1 is gone"):
        sender.post([2])
