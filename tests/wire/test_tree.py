"""Trees survive a round trip as bytes, and garbage is refused, not executed."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter, namedtuple
from typing import Any, NamedTuple

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
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(),
    tensors,
)
keys = st.one_of(st.none(), st.integers(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(), keys), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
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
    "odd",
    [object(), {frozenset(): 2}, torch.zeros(2, 2).to_sparse(), {"a": {3}}],
    ids=["object", "set as key", "sparse", "set"],
)
def test_what_cannot_travel_is_refused_with_a_sentence(odd: Any) -> None:
    with pytest.raises(NotDistributable, match="travel"):
        encode(odd)


class Pair(NamedTuple):
    a: torch.Tensor
    b: int | None = None

    class Inner(NamedTuple):
        only: str


class Counted(Pair):
    """Its `__new__` has other parameters, and must not be called with received values."""

    def __new__(cls) -> Counted:
        return super().__new__(cls, torch.ones(2), 3)


def test_a_named_tuple_is_one_of_its_class_again() -> None:
    for tree in (Pair(torch.ones(2)), Counted(), Pair.Inner("text")):
        told = decode(encode([tree]))[0]
        assert type(told) is type(tree) and told[1:] == tree[1:]
    pair = decode(encode({"pair": Pair(torch.ones(2), 5)}))["pair"]
    assert isinstance(pair, Pair) and torch.equal(pair.a, torch.ones(2)) and pair.b == 5


def test_of_a_class_unknown_here_the_fields_have_their_names() -> None:
    class Local(NamedTuple):
        x: int
        y: Any

    told = decode(encode(Local(1, [Local(2, None)])))
    assert isinstance(told, tuple) and type(told)._fields == ("x", "y")
    assert told.x == 1 and told.y[0].x == 2 and type(told) is type(told.y[0])
    odd = namedtuple("odd", ["class", "_a"], rename=True)(1, 2)  # type: ignore[misc]
    assert decode(encode(odd)) == (1, 2)


@pytest.mark.parametrize(
    ("module", "name", "fields"),
    [
        ("this", "Pair", ["a", "b"]),
        ("os", "environ", ["a", "b"]),
        (__name__, "Pair", ["a", "c"]),
        ("builtins", "tuple", ["a", "b"]),
    ],
)
def test_the_wire_names_nothing_but_loaded_named_tuples(
    module: str, name: str, fields: list[str]
) -> None:
    """Neither another class nor a module that is not imported."""
    told = decode(_outlined({"n": [module, name, fields, [{"v": 1}, {"v": 2}]]}))
    assert told == (1, 2) and type(told)._fields == tuple(fields) and not isinstance(told, Pair)
    assert "this" not in sys.modules


@pytest.mark.parametrize("fields", [["a", "b", "c"], ["a"], [["a"], "b"], 2])
def test_fields_that_do_not_fit_are_refused(fields: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(_outlined({"n": [__name__, "Pair", fields, [{"v": 1}, {"v": 2}]]}))


def _outlined(outline: Any) -> torch.Tensor:
    text = json.dumps(outline).encode()
    return torch.frombuffer(bytearray(struct.pack(">Q", len(text)) + text), dtype=torch.uint8)
