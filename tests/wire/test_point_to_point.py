"""Point-to-point sums and exchanges: exact, equal on all ranks, receives posted before sends."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Queue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.wire.point_to_point import BackgroundWork, exchange, sum_half
from tests.clock import PATIENCE, in_time

pytestmark = pytest.mark.timeout(60)


@dataclass
class Post:
    """The messages between members of a group, by sender, receiver and tag."""

    size: int
    boxes: dict[tuple[int, int, int], Queue[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        # All created here, as two threads could create the same one twice.
        ranks = range(self.size)
        self.boxes = {(a, b, tag): Queue() for a in ranks for b in ranks for tag in (6, 7)}


@dataclass
class Member:
    """The part of a Gloo group that a sum uses."""

    post: Post
    rank: int
    said: list[tuple[str, int]] = field(default_factory=list)

    def size(self) -> int:
        return self.post.size

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.said.append(("send", tag))
        self.post.boxes[self.rank, to, tag].put(tensors[0].clone())
        return Arrived()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        self.said.append(("recv", tag))
        return Arriving(self.post.boxes[source, self.rank, tag], tensors[0])


class Arrived:
    def wait(self) -> None:
        pass


@dataclass
class Arriving:
    box: Queue[Tensor]
    into: Tensor

    def wait(self) -> None:
        self.into.copy_(self.box.get(timeout=PATIENCE))


def added(values: Tensor) -> tuple[list[Tensor], list[Member]]:
    """Sum the rows, each on its own member."""
    post = Post(len(values))
    members = [Member(post, rank) for rank in range(len(values))]
    flats = [row.clone() for row in values]
    errands = [
        BackgroundWork(sum_half, member, member.rank, flat, 6)
        for member, flat in zip(members, flats, strict=True)
    ]
    for errand in errands:
        errand.wait(timedelta(seconds=PATIENCE))
    return flats, members


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(0, 23),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(0, 1000),
)
def test_sums_are_rounded_once_and_alike(
    size: int, count: int, kind: torch.dtype, seed: int
) -> None:
    values = torch.randn(size, count, generator=torch.Generator().manual_seed(seed)).to(kind)
    flats, members = added(values)
    for flat in flats:
        assert torch.equal(flat, values.float().sum(0).to(kind))
    assert not any(box.qsize() for box in members[0].post.boxes.values()), "all were taken"


def test_all_is_offered_to_be_received_before_anything_is_sent() -> None:
    """Otherwise a late member sends first, and its peers' messages wait behind its message."""
    _, members = added(torch.ones(4, 10, dtype=torch.bfloat16))
    for member in members:
        kinds = [kind for kind, _ in member.said]
        assert kinds == ["recv"] * 6 + ["send"] * 6
        assert {tag for _, tag in member.said} == {6, 7}


def test_an_exchange_offers_to_receive_before_it_sends() -> None:
    """Otherwise an exchange over a slow link takes twice as long: one direction after the other."""
    post = Post(2)
    members = [Member(post, rank) for rank in range(2)]
    rows, found = torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2, dtype=torch.int64)
    works = [
        BackgroundWork(exchange, each, [(1 - i, rows[i])], [(1 - i, found[i])], 6)
        for i, each in enumerate(members)
    ]
    for work in works:
        work.wait(timedelta(seconds=PATIENCE))
    assert found.tolist() == [[3, 4], [1, 2]]
    assert [[kind for kind, _ in each.said] for each in members] == [["recv", "send"]] * 2


def test_an_errand_can_be_waited_for_again() -> None:
    gate = threading.Event()
    errand = BackgroundWork(gate.wait, PATIENCE)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="not done yet"):
        errand.wait(timedelta(milliseconds=20))
    assert not errand.is_completed()
    in_time(time.monotonic() - begun, 5)
    gate.set()
    errand.wait()
    assert errand.is_completed()


def test_what_goes_wrong_is_told_to_who_waits() -> None:
    def lost() -> None:
        raise RuntimeError("Connection closed by peer")

    errand = BackgroundWork(lost)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            errand.wait()
    assert errand.is_completed()


def test_nothing_is_held_when_it_is_done() -> None:
    """Tensors that another thread frees while the interpreter ends would abort it."""
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    errand = BackgroundWork(lambda each: None, tensor)
    del tensor
    errand.wait()
    assert held() is None
