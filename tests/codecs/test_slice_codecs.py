"""Slice codecs: what is sent plus the residual is the input."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.codecs import sign
from stratagem.codecs.int8 import Int8
from stratagem.codecs.sign import Sign
from stratagem.codecs.topk import TopK, largest
from stratagem.errors import UsageError

pytestmark = pytest.mark.timeout(60)

DTYPES = st.sampled_from([torch.float32, torch.float64])
LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=5)


def drawn(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.randint(-4, 3, (count,), generator=dice).double()
    return (torch.randn(count, generator=dice, dtype=torch.float64) * scale).to(dtype)


def sent_and_left(codec: Any, values: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    wire = torch.zeros(-(-codec.room(lengths, values.itemsize) // 8) * 8, dtype=torch.uint8)
    left = values.clone()
    codec.take(left, lengths, wire)
    sent = torch.zeros_like(values)
    codec.add(wire, lengths, sent)
    again = torch.ones_like(values)
    codec.add(wire, lengths, again)
    assert torch.equal(again, 1 + sent)
    return sent, left


def assert_adds_up(sent: Tensor, left: Tensor, values: Tensor) -> None:
    size = float(values.abs().max()) if len(values) else 0.0
    torch.testing.assert_close(sent + left, values, rtol=0, atol=3e-7 * size)


@given(st.integers(0, 10**6), LENGTHS, DTYPES, st.floats(0.01, 1.0))
def test_the_largest_are_sent_as_they_are(
    seed: int, lengths: list[int], dtype: torch.dtype, share: float
) -> None:
    """The right number of each parameter, exact; the rest is at most (1 - share) of the norm."""
    values, codec = drawn(seed, sum(lengths), dtype), TopK(share)
    sent, left = sent_and_left(codec, values, lengths)
    assert torch.equal(sent + left, values) and not (sent * left).any()
    for v, s, count in zip(
        torch.split(values, lengths), torch.split(sent, lengths), codec.counts(lengths), strict=True
    ):
        assert int((s != 0).sum()) == count
        kept = (v - s).double().square().sum()
        assert kept <= (1 - count / len(v)) * v.double().square().sum() * (1 + 1e-9) + 1e-30


@pytest.mark.parametrize("codec", [Int8(1), Int8(7), Int8(1024), TopK(0.1), TopK(0.5), Sign()])
@given(seed=st.integers(0, 10**6), lengths=LENGTHS, dtype=DTYPES)
def test_few_numbers_get_the_bits_of_many(
    codec: Any, seed: int, lengths: list[int], dtype: torch.dtype
) -> None:
    """`take_few` and `add_few` give the same bytes as `take` and `add`."""
    values, found = drawn(seed, sum(lengths), dtype), []
    for small in (0, 1 << 14):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stratagem.codecs.compression._SMALL", small)
            room = codec.room(lengths, dtype.itemsize)
            wire = torch.zeros(-(-room // 8) * 8, dtype=torch.uint8)
            left, into = values.clone(), values.flip(0)
            codec.take(left, lengths, wire)
            codec.add(wire, lengths, into)
            found.append([wire, left, into])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("count", [100, 1 << 15])
@pytest.mark.parametrize("place", [-1, 1 << 20])
def test_a_place_that_there_is_not_is_refused(count: int, place: int) -> None:
    wire = torch.zeros(8, dtype=torch.uint8)
    wire[4:].view(torch.int32).fill_(place)
    with pytest.raises(ValueError, match="places that there are not"):
        TopK(1 / count).add(wire, [count], torch.zeros(count))


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 9), DTYPES)
def test_the_order_of_numbers_does_not_matter_to_the_largest(
    seed: int, length: int, few: int, dtype: torch.dtype
) -> None:
    values = drawn(seed, length, dtype)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    codec = TopK(few / 10)
    sent, _ = sent_and_left(codec, values, [length])
    moved, _ = sent_and_left(codec, values[order], [length])
    assert torch.equal(moved, sent[order])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from([1, 37, 400, 20_000]))
def test_a_sample_finds_the_same_as_a_sort(seed: int, kind: int, count: int) -> None:
    """With many zeros, many ties, and large numbers outside of the sample."""
    dice = np.random.default_rng(seed)
    values = dice.standard_normal(40_000).astype(np.float32)
    if kind == 1:
        values[dice.random(len(values)) < 0.99] = 0
    if kind == 2:
        values = np.round(values)
    if kind == 3:
        values[::128] *= 1e-3
    places = largest(torch.from_numpy(values), count).numpy()
    assert len(set(places.tolist())) == count
    found = np.sort(np.abs(values[places]))
    assert np.array_equal(found, np.sort(np.abs(values))[-count:])


@given(st.integers(0, 10**6), LENGTHS, DTYPES, st.integers(1, 50))
def test_eight_bits_are_off_by_half_a_scale(
    seed: int, lengths: list[int], dtype: torch.dtype, block: int
) -> None:
    values = drawn(seed, sum(lengths), dtype)
    if len(values):
        values[: len(values) // 2] = 0
    sent, left = sent_and_left(Int8(block), values, lengths)
    assert_adds_up(sent, left, values)
    for v, s in zip(values.split(block), sent.split(block), strict=True):  # type: ignore[no-untyped-call]
        scale = float(v.abs().max()) / 127 if len(v) else 0.0
        assert float((v - s).abs().max() if len(v) else 0) <= 0.5 * scale * (1 + 1e-4)
        assert bool(v.any()) or not s.any()


@given(st.integers(0, 10**6), LENGTHS, DTYPES)
def test_signs_with_the_mean_size(seed: int, lengths: list[int], dtype: torch.dtype) -> None:
    """The residual contracts by norm1^2 / (d norm2^2), as proved in the paper."""
    values = drawn(seed, sum(lengths), dtype)
    sent, left = sent_and_left(Sign(), values, lengths)
    assert_adds_up(sent, left, values)
    for v, s in zip(torch.split(values, lengths), torch.split(sent, lengths), strict=True):
        size = v.abs().mean()
        torch.testing.assert_close(s.abs(), size.expand(len(v)))
        assert torch.equal(s >= 0, v >= 0) or not size
        bound = v.double().square().sum() - v.double().abs().sum() ** 2 / len(v)
        assert (v - s).double().square().sum() <= bound * (1 + 1e-5) + 1e-9


@given(st.integers(0, 10**6), LENGTHS, DTYPES)
def test_signs_of_long_slices_are_taken_in_parts(
    seed: int, lengths: list[int], dtype: torch.dtype
) -> None:
    """With parts of eight numbers, in which parameters begin and end."""
    values = drawn(seed, sum(lengths), dtype)
    whole = sent_and_left(Sign(), values, lengths)
    with patch.object(sign, "_AT_ONCE", 8):
        parts = sent_and_left(Sign(), values, lengths)
    for found, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopK(0.1, momentum=1.0),
        lambda: TopK(0.1, clip=0.0),
        lambda: Int8(0),
        lambda: Sign(dense_steps=-1),
    ],
)
def test_records_refuse_what_makes_no_sense(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


def test_records_read_as_they_are_written() -> None:
    assert repr(TopK(0.01, momentum=0.9)) == "TopK(share=0.01, momentum=0.9)"
    assert repr(Int8()) == "Int8()" and repr(Sign(dense_steps=3)) == "Sign(dense_steps=3)"
