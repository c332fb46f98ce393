"""The split of layers over stages, compared with all possible splits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.rules.layer_split import LayerCost, slowest, split_layers

pytestmark = pytest.mark.timeout(60)
costs = st.builds(
    LayerCost,
    seconds=st.integers(0, 9).map(float),
    fixed=st.integers(0, 9),
    activation=st.integers(0, 3),
    crossing=st.integers(0, 5),
)


def _judged(
    layers: list[LayerCost], firsts: list[int], kept: list[int], limit: float
) -> tuple[float, float] | None:
    ends = [*firsts[1:], len(layers)]
    for i, j, n in zip(firsts, ends, kept, strict=True):
        if sum(c.fixed + n * c.activation for c in layers[i:j]) > limit:
            return None
    return slowest(layers, firsts), float(sum(layers[i - 1].crossing for i in firsts[1:]))


@given(st.lists(costs, min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 40))
def test_no_split_is_better(layers: list[LayerCost], stages: int, limit: int) -> None:
    kept = list(range(stages, 0, -1))
    cuts = combinations(range(1, len(layers)), stages - 1)
    judged = [_judged(layers, [0, *cut], kept, limit) for cut in cuts]
    fitting = [each for each in judged if each is not None]
    found = split_layers(layers, stages, kept, limit)
    if found is None:
        assert not fitting
        return
    assert found[0] == 0 and sorted(set(found)) == found and len(found) == stages
    assert _judged(layers, found, kept, limit) == min(fitting)


def test_a_hundred_layers_are_balanced() -> None:
    layers = [LayerCost(1.0 + (i % 7) / 7) for i in range(100)]
    found = split_layers(layers, 4)
    assert found is not None
    whole = sum(c.seconds for c in layers)
    assert slowest(layers, found) < 1.03 * whole / 4
