"""Where a model is cut, and into how many microbatches: with costs that are given, not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.rules.layer_split import LayerCost
from stratagem.training.layer_costs import LayerMeter
from stratagem.training.layer_graph import trace
from stratagem.training.settings import Pipeline
from stratagem.training.stage_plan import make_plan


def planned(
    monkeypatch: pytest.MonkeyPatch, overhead: float, **options: Any
) -> tuple[int, tuple[int, ...], str]:
    """A layer takes a millisecond a row, and so many for each microbatch."""

    def measure(self: LayerMeter, inputs: Sequence[Any]) -> list[LayerCost]:
        seconds = (overhead + len(inputs[0])) / 1e3
        return [LayerCost(seconds, 3_000_000, 100, 4000 * len(inputs[0])) for _ in range(4)]

    monkeypatch.setattr(LayerMeter, "measure", measure)
    graph = trace(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))
    plan, table = make_plan(graph, Pipeline(**options), 2, 64, lambda n: [torch.zeros(n, 6)])
    return plan.microbatches, plan.firsts, table


@pytest.mark.parametrize(("overhead", "best"), [(4, 4), (0, 8), (10, 2)])
def test_the_number_of_microbatches_is_the_fastest(
    overhead: float, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(M + 1) stages of two layers: with 4 ms for each of 2, 4 and 8 microbatches 216, 200, 216."""
    assert planned(monkeypatch, overhead)[:2] == (best, (0, 2))
    assert planned(monkeypatch, overhead, microbatches=3)[0] == 3


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each stage: its device, layers, time, memory, and what crosses to which stage."""
    table = planned(monkeypatch, 0, microbatches=4, split=("3",))[2]
    assert table.splitlines() == [
        "stage  device  layers      ms     MB   hands on",
        "0      0       0 .. 2 (3)  48.00  9.0  2 to 1, 0.06 MB",
        "1      1       3           16.00  3.0  -",
    ]
    parts = planned(monkeypatch, 0, microbatches=4, schedule="interleaved", parts=2)[2]
    assert [line.split()[:3] for line in parts.splitlines()[1:]] == [
        [str(part), str(part % 2), str(part)] for part in range(4)
    ]
