"""The same step while other replicas of this machine compute, too.

Replicas share caches, memory and processors, and how much that costs depends on the model: a large
matrix waits for memory, a convolution does not. So it is measured, with the strategies' own
processes and threads, and nothing exchanged.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from stratagem.cluster.cores import cores
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.rehearsal import Rehearsal
from stratagem.strategies.replica import current_replica

_LEAST, _MOST = 5, 100


def counts() -> list[int]:
    """How many replicas to try: a few points of a curve that is nearly straight."""
    most = cores()
    return sorted({n for n in (2, most // 2, most) if 2 <= n <= most})


def crowd(
    trial: Rehearsal, batch: Any, many: Sequence[int], seconds: float = 1.0
) -> tuple[tuple[int, float], ...]:
    """(n, forward and backward) for these numbers of CPU replicas at once.

    Of the slowest in each step: cores are not equal, and in lock step all go at its pace.
    """
    found = []
    for n in many:
        strategy = MirroredStrategy([f"cpu:{i}" for i in range(n)])
        try:
            times = strategy.run(_compute, trial.module, trial.loss, batch, seconds)
        finally:
            strategy.close()
        found.append((n, statistics.fmean(max(step) for step in zip(*times, strict=False))))
    return tuple(found)


def _compute(
    module: nn.Module, loss: Callable[[Any], Tensor], batch: Any, seconds: float
) -> list[float]:
    """On one replica: the seconds of steps that nobody waits for."""
    module.train()
    times: list[float] = []
    _step(module, loss, batch)
    current_replica().barrier()
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() < end):
        times.append(_step(module, loss, batch))
    current_replica().barrier()
    return times[1:]


def _step(module: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> float:
    for param in module.parameters():
        param.grad = None
    start = time.perf_counter()
    loss(batch).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start
