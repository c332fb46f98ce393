"""Properties of every compression of pushes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.codecs.compression import Compression
from stratagem.codecs.int8 import Int8
from stratagem.codecs.low_rank import PowerSGD
from stratagem.codecs.pushed import PushFeedback, check_pushed, decode_piece, piece_bytes
from stratagem.codecs.sign import Sign
from stratagem.codecs.topk import TopK
from stratagem.codecs.wire_choice import wire_from_json, wire_to_json
from stratagem.errors import UsageError

pytestmark = pytest.mark.timeout(60)

SHAPES = [(3, 4), (), (7,), (2, 3, 5), (0,), (9, 8)]
NAMES = list("abcdef")
RECORDS: list[Compression] = [
    Int8(16),
    TopK(0.1),
    TopK(0.2, momentum=0.7),
    Sign(),
    PowerSGD(2),
    TopK(0.1, momentum=0.5, dense_steps=2),
    PowerSGD(1, dense_steps=1),
]
record = st.sampled_from(RECORDS)
seeds = st.integers(0, 10**6)


class Worker:
    """Pushes whole variables, and decodes them as a server does."""

    def __init__(self, wire: Compression) -> None:
        self.wire = wire
        like = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        self.feedback = PushFeedback(wire, NAMES, like)

    def push(self, gradients: list[Tensor], counted: bool = True) -> list[Tensor]:
        found = []
        for i, (shape, g) in enumerate(zip(SHAPES, gradients, strict=True)):
            self.feedback.charge(i, g.reshape(-1))
            if self.feedback.dense:
                found.append(self.feedback.dense_piece(i, 0, g.numel()))
                continue
            wire = torch.zeros(piece_bytes(self.wire, shape, 8), dtype=torch.uint8)
            self.feedback.encode(i, 0, shape, wire)
            into = torch.full([g.numel()], 7.0, dtype=torch.float64)
            decode_piece(self.wire, wire, shape, into)
            found.append(into)
        self.feedback.settle(counted=counted)
        return found

    def kept(self, name: str = "residual") -> list[Tensor]:
        by_name = self.feedback.state()["kept"][name]
        return [by_name[n].reshape(-1) for n in NAMES]


def gradients(seed: int, step: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(1000 * seed + step)
    return [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in SHAPES]


def same(a: list[Tensor], b: list[Tensor], near: float = 0.0) -> bool:
    return all(torch.allclose(x, y, rtol=0.0, atol=near) for x, y in zip(a, b, strict=True))


@settings(max_examples=14)
@given(record, seeds)
def test_what_is_left_out_is_kept(wire: Compression, seed: int) -> None:
    """sent + residual = gradient (or its momentum) + residual before."""
    worker, momentum = Worker(wire), getattr(wire, "momentum", 0.0)
    for step in range(5):
        before, given = worker.kept() if step else None, gradients(seed, step)
        moved = worker.kept("momentum") if step and momentum else None
        sent = worker.push(given)
        for i, g in enumerate(given):
            charge = g.reshape(-1) + (momentum * moved[i] if moved else 0.0)
            charge = charge + (before[i] if before else 0.0)
            assert torch.allclose(sent[i] + worker.kept()[i], charge, rtol=0.0, atol=1e-12)


@settings(max_examples=14)
@given(record, seeds)
def test_a_push_that_does_not_count_leaves_no_trace(wire: Compression, seed: int) -> None:
    one, other = Worker(wire), Worker(wire)
    for step in range(4):
        one.push(gradients(seed, 100 + step), counted=False)
        assert same(one.push(gradients(seed, step)), other.push(gradients(seed, step)))
    assert same(one.kept(), other.kept())


@settings(max_examples=14)
@given(record, seeds, st.sampled_from([float("nan"), float("inf")]))
def test_a_number_that_is_none_arrives_and_is_not_kept(
    wire: Compression, seed: int, bad: float
) -> None:
    worker = Worker(wire)
    worker.push(gradients(seed, 0))
    before, spoilt = worker.kept(), gradients(seed, 1)
    spoilt[3].view(-1)[7] = bad
    sent = worker.push(spoilt)
    assert not bool(sent[3].isfinite().all())
    assert same(worker.kept(), before)
    assert all(bool(each.isfinite().all()) for each in worker.push(gradients(seed, 2)))


@settings(max_examples=14)
@given(record, seeds)
def test_what_is_saved_goes_on_bit_for_bit(wire: Compression, seed: int) -> None:
    worker, others = Worker(wire), Worker(wire)
    for step in range(3):
        worker.push(gradients(seed, step))
        others.push(gradients(seed + 1, step))
    again = Worker(wire)
    again.feedback.load([others.feedback.state(), worker.feedback.state()], 1, 2, mean=False)
    for step in range(3, 6):
        assert same(again.push(gradients(seed, step)), worker.push(gradients(seed, step)))


@settings(max_examples=14)
@given(record, seeds, st.integers(1, 4), st.booleans())
def test_another_number_of_workers_shares_what_was_kept(
    wire: Compression, seed: int, count: int, mean: bool
) -> None:
    """The sum if each push makes an update, the mean if all pushes make one."""
    three = [Worker(wire) for _ in range(3)]
    for i, worker in enumerate(three):
        for step in range(3):
            worker.push(gradients(seed + i, step))
    states = [worker.feedback.state() for worker in three]
    new = [Worker(wire) for _ in range(count)]
    for i, worker in enumerate(new):
        worker.feedback.load(states, i, count, mean)
    for i in range(len(SHAPES)):
        total = torch.stack([w.kept()[i] for w in new]).sum(0) / (count if mean else 1)
        before = torch.stack([w.kept()[i] for w in three]).sum(0) / (3 if mean else 1)
        assert torch.allclose(total, before, rtol=0.0, atol=1e-12)


@settings(max_examples=14)
@given(seeds, st.integers(1, 9))
def test_rows_of_a_table_keep_what_eight_bits_leave_out(seed: int, block: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    wire, table = Int8(block), torch.zeros(6, 3, dtype=torch.float64)
    feedback, total, given = PushFeedback(wire, ["t"], [table]), table.clone(), table.clone()
    for _ in range(6):
        rows = torch.randperm(6, generator=dice)[:3].sort().values
        values = torch.randn(3, 3, generator=dice, dtype=torch.float64)
        encoded = feedback.encode_rows(0, 0, rows, values)
        assert len(encoded) == 9 + 4 * -(-9 // block)
        sent = torch.zeros(9, dtype=torch.float64)
        wire.add(encoded, [9], sent)
        feedback.settle(counted=True)
        total[rows] += sent.view(3, 3)
        given[rows] += values
    left = feedback.state()["kept"]["residual"]["t"]
    assert torch.allclose(total + left, given, rtol=0.0, atol=1e-12)
    assert float(left.abs().max()) > 0.0


@pytest.mark.parametrize("wire", [*RECORDS, None, "bfloat16"])
def test_servers_are_told_the_wire_in_json(wire: Any) -> None:
    assert wire_from_json(wire_to_json(wire)) == wire


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"compile\(clip_norm"):
        check_pushed(TopK(0.1, clip=1.0))
    with pytest.raises(UsageError, match="is not known"):
        wire_from_json(["Compression", {}])
