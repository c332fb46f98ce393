"""OrderedSum equals a plain sum, in rank order, whichever replica is first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.wire import ordered_sum
from stratagem.wire.ordered_sum import OrderedSum
from stratagem.wire.shared_memory import SharedMemoryCollective
from tests.clock import PATIENCE, wait_for
from tests.state.crowd_support import together

pytestmark = pytest.mark.timeout(60)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from([0, 100, 1 << 20]),
    st.data(),
)
def test_sums_of_whatever_is_given(
    sizes: list[int], count: int, passes: list[int], window: int, draw: st.DataObject
) -> None:
    """Several steps of several passes, in which any replica may skip any part."""
    sizes = [*sizes, 9]
    given_here: Any = {}
    dice = torch.Generator().manual_seed(draw.draw(st.integers(0, 99)))
    for step, number in enumerate(passes):
        for turn in range(number):
            for rank in range(count):
                parts = draw.draw(st.sets(st.sampled_from(range(len(sizes)))))
                given_here[step, turn, rank] = {
                    i: torch.randn(sizes[i], generator=dice) for i in sorted(parts)
                }

    def work(collective: SharedMemoryCollective) -> list[Tensor]:
        sums, found = OrderedSum(sizes, collective, window), []
        for step, number in enumerate(passes):
            sums.begin_step()
            for turn in range(number):
                for part, values in given_here[step, turn, collective.rank].items():
                    sums.add(part, values)
                sums.end_pass()
            collective.barrier()
            found.append(sums.flat.clone())
            collective.barrier()
        return found

    patience, chunk = ordered_sum._PATIENCE, ordered_sum.CHUNK
    ordered_sum._PATIENCE, ordered_sum.CHUNK = 0.01, 7
    try:
        found = together(count, work)
    finally:
        ordered_sum._PATIENCE, ordered_sum.CHUNK = patience, chunk
    for step, number in enumerate(passes):
        expected: list[Tensor | None] = [None] * len(sizes)
        for turn in range(number):
            for rank in range(count):
                for part, values in given_here[step, turn, rank].items():
                    so_far = expected[part]
                    expected[part] = values if so_far is None else so_far + values
        for rank in range(count):
            for mine, total in zip(found[rank][step].split(sizes), expected, strict=True):
                assert total is None or torch.equal(mine, total)  # to the bit: one order


def test_who_is_early_keeps_a_window_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two replicas is early; it buffers at most the window and one part."""
    parts, size = 12, 1000
    most, made = 4 * 4 * size, dict[int, OrderedSum]()
    monkeypatch.setattr(ordered_sum, "_PATIENCE", PATIENCE)

    def work(collective: SharedMemoryCollective) -> int:
        sums = made[collective.rank] = OrderedSum([size] * parts, collective, window=3 * 4 * size)
        collective.barrier()
        sums.begin_step()
        for part in range(parts):
            if collective.rank == 0 and part == 0:
                wait_for(lambda: made[1].most_kept >= most)
            sums.add(part, torch.ones(size))
        sums.end_pass()
        collective.barrier()
        assert float(sums.flat.sum()) == 2 * parts * size
        return sums.most_kept

    assert together(2, work) == [0, most]


def test_nobody_waits_for_ever_in_mid_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica adds nothing, and waits for the second before it ends the pass."""
    monkeypatch.setattr(ordered_sum, "_PATIENCE", 0.05)

    def work(collective: SharedMemoryCollective) -> None:
        sums = OrderedSum([100] * 5, collective, window=0)
        sums.begin_step()
        if collective.rank == 1:
            for part in range(5):
                sums.add(part, torch.ones(100))
        collective.barrier()  # as a synchronised layer does
        sums.end_pass()
        collective.barrier()
        assert float(sums.flat.sum()) == 500

    together(2, work)
