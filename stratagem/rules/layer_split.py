"""Cutting a row of layers into stages that fit their memory, so that the slowest is fastest.

Dynamic programming over contiguous cuts:

    best[s][j] = min over i < j of max(best[s - 1][i], time of layers i..j on stage s)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf


@dataclass(frozen=True)
class LayerCost:
    """One layer, measured.

    seconds     forward and backward of a microbatch
    fixed       bytes of parameters, gradients and optimizer state
    activation  bytes kept for each microbatch until its backward
    crossing    bytes that a cut behind the layer hands over
    forward     seconds of the forward alone
    late        seconds of the weight gradient, if that is computed once a batch, at its end
    """

    seconds: float
    fixed: int = 0
    activation: int = 0
    crossing: int = 0
    forward: float = 0.0
    late: float = 0.0


def split_layers(
    costs: Sequence[LayerCost],
    stages: int,
    kept: Sequence[int] | None = None,
    limit: float | None = None,
) -> list[int] | None:
    """Return the first layer of each stage; None if no cut fits.

    Args:
        kept: how many microbatches each stage keeps.
        limit: bytes that a stage may have.

    Of equally fast cuts it takes the one that hands over the fewest bytes.
    """
    if stages > len(costs):
        return None
    kept = [1] * stages if kept is None else kept
    limit = inf if limit is None else limit
    seconds = [0.0, *accumulate(c.seconds for c in costs)]
    fixed = [0, *accumulate(c.fixed for c in costs)]
    activation = [0, *accumulate(c.activation for c in costs)]

    def fits(stage: int, i: int, j: int) -> bool:
        return fixed[j] - fixed[i] + kept[stage] * (activation[j] - activation[i]) <= limit

    def time(best: float, stage: int, i: int, j: int) -> float:
        return max(best, seconds[j] - seconds[i]) if fits(stage, i, j) else inf

    fastest, _ = _least(len(costs), stages, time)
    if fastest == inf:
        return None

    def handed_over(best: float, stage: int, i: int, j: int) -> float:
        if seconds[j] - seconds[i] > fastest or not fits(stage, i, j):
            return inf
        return best + (costs[i - 1].crossing if i else 0)

    _, firsts = _least(len(costs), stages, handed_over)
    return firsts


def _least(
    count: int, stages: int, cost: Callable[[float, int, int, int], float]
) -> tuple[float, list[int]]:
    """Return the least cost, and the first layer of each stage; `cost` adds a stage."""
    best = [0.0, *[inf] * count]
    begins: list[list[int]] = []
    for stage in range(stages):
        now, begin = [inf] * (count + 1), [0] * (count + 1)
        for j in range(stage + 1, count - (stages - stage - 1) + 1):
            for i in range(stage, j):
                if best[i] < inf and (found := cost(best[i], stage, i, j)) < now[j]:
                    now[j], begin[j] = found, i
        best = now
        begins.append(begin)
    firsts, end = [], count
    for begin in reversed(begins):
        end = begin[end]
        firsts.append(end)
    return best[count], firsts[::-1]


def slowest(costs: Sequence[LayerCost], firsts: Sequence[int]) -> float:
    """Return the seconds of a microbatch in the slowest stage."""
    ends = [*firsts[1:], len(costs)]
    return max(sum(c.seconds for c in costs[i:j]) for i, j in zip(firsts, ends, strict=True))
