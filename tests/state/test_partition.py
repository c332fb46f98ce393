"""Cutting variables and laying the pieces onto servers."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.state.partition import (
    FixedShards,
    MaxSize,
    MinSize,
    Partitioner,
    Piece,
    partition,
    place,
)

calm = settings(deadline=None)  # a busy machine is no failure
counts = st.integers(1, 9)
partitioners = st.one_of(
    st.none(),
    st.builds(FixedShards, counts),
    st.builds(MinSize, st.integers(1, 200), counts),
    st.builds(MaxSize, st.integers(1, 200), st.none() | counts),
)
shapes = st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), max_size=8)


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        (FixedShards(3), (2, 5), 2),
        (FixedShards(3), (5,), 3),
        (MinSize(4, 2), (6, 1), 2),
        (MinSize(4, 10), (6, 1), 6),
        (MinSize(10, 9), (6, 1), 3),
        (MinSize(256 << 10, 16), (1024, 1024), 16),
        (MinSize(), (1024, 1024), 1),
        (MaxSize(4), (6, 1), 6),
        (MaxSize(10), (7, 1), 4),
        (MaxSize(4, max_shards=2), (6, 1), 2),
        (MaxSize(1), (3, 5), 3),
        (MaxSize(1 << 20), (3, 5), 1),
    ],
)
def test_number_of_shards(partitioner: Partitioner, shape: tuple[int, ...], shards: int) -> None:
    assert partitioner.shards(shape, 4) == shards
    assert len(partition([shape], 4, 1, partitioner)) == shards


def test_thirteen_rows_over_five_shards() -> None:
    pieces = partition([(13, 2)], 4, 5, FixedShards(5))
    assert [p.stop - p.start for p in pieces] == [3, 3, 3, 2, 2]
    assert sorted(p.server for p in pieces) == [0, 1, 2, 3, 4]


@calm
@given(shapes, st.integers(1, 5), partitioners, st.booleans())
def test_every_row_exactly_once(
    shapes: list[tuple[int, ...]], servers: int, partitioner: Partitioner | None, whole: bool
) -> None:
    pieces = partition(shapes, 4, servers, partitioner, whole=whole)
    assert pieces == partition(shapes, 4, servers, partitioner, whole=whole)
    assert list(pieces) == sorted(pieces, key=lambda p: (p.variable, p.start))
    for variable, shape in enumerate(shapes):
        own = [p for p in pieces if p.variable == variable]
        rows = [row for p in own for row in range(p.start, p.stop)]
        assert own and rows == list(range(shape[0] if shape else 1))
        sizes = [p.stop - p.start for p in own]
        assert max(sizes) - min(sizes) <= 1 and (len(own) == 1 or min(sizes) >= 1)
        assert sum(p.size(shape) for p in own) == math.prod(shape)
        if whole or not shape:
            assert len(own) == 1 and own[0].is_whole(shape)
    assert all(0 <= p.server < servers for p in pieces)


@calm
@given(st.lists(st.integers(0, 12), max_size=7), st.integers(1, 3))
def test_fullest_server_is_near_the_best_there_is(sizes: list[int], servers: int) -> None:
    def fullest(homes: tuple[int, ...] | list[int]) -> int:
        loads = [0] * servers
        for size, home in zip(sizes, homes, strict=True):
            loads[home] += size
        return max(loads)

    best = min(map(fullest, itertools.product(range(servers), repeat=len(sizes))))
    found = fullest(place(sizes, servers))
    assert best <= found <= best * 4 / 3


def test_many_pieces_take_no_time() -> None:
    sizes = [(i * 7919) % 10_007 + 1 for i in range(3000)]
    begin = time.process_time()
    homes = place(sizes, 16)
    assert time.process_time() - begin < 5.0
    loads = [sum(s for s, h in zip(sizes, homes, strict=True) if h == k) for k in range(16)]
    assert max(loads) < 1.001 * sum(loads) / 16


def test_the_default_cuts_what_is_large() -> None:
    pieces = partition([(1024, 1024), (1024,), ()], 4, 4)
    assert [p.server for p in pieces if p.variable == 0] == [0, 1, 2, 3]
    assert len(pieces) == 6
    assert pieces[-1] == Piece(2, 0, 1, pieces[-1].server)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="whole number"):
        FixedShards(0)
    with pytest.raises(UsageError, match="whole number"):
        MinSize(0)
    with pytest.raises(UsageError, match="whole number"):
        MaxSize(4, 0)
    with pytest.raises(UsageError, match="servers"):
        partition([(2,)], 4, 0)
