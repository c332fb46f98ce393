"""Trees of tensors as bytes: what goes in comes out, and garbage is refused, not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import NotDistributable
from stratagem.wire.tree import decode, encode

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda dtype, shape: (torch.randn(shape) * 3).to(dtype), st.sampled_from(DTYPES), shapes
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(),
    tensors,
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(trees)
def test_round_trip(tree: Any) -> None:
    assert same(tree, decode(encode(tree)))


@given(trees, st.data())
def test_cut_short(tree: Any, draw: st.DataObject) -> None:
    data = encode(tree)
    size = draw.draw(st.integers(0, len(data) - 1))
    with pytest.raises(ValueError):
        decode(data[:size])


@given(st.binary(max_size=200))
def test_garbage_raises_and_allocates_nothing(raw: bytes) -> None:
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, IndexError)):
        decode(data)


def test_a_huge_claim_is_refused_before_memory_is_taken() -> None:
    data = encode(torch.zeros(4))
    text = bytes(data.tolist())
    huge = text.replace(b"[4]", b"[9]")
    assert huge != text
    with pytest.raises(ValueError, match="claims"):
        decode(torch.frombuffer(bytearray(huge), dtype=torch.uint8))


@pytest.mark.parametrize(
    "odd", [object(), {1: 2}, torch.zeros(2, 2).to_sparse(), {"a": {3}}],
    ids=["object", "number as key", "sparse", "set"],
)
def test_what_cannot_travel_is_refused_with_a_sentence(odd: Any) -> None:
    with pytest.raises(NotDistributable, match="travel"):
        encode(odd)
