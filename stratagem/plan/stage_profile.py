"""Measure the operations of pipeline stages in their real code, with several processes at once.

Each process has the whole model as the only stage of a pipeline, with the threads of a stage, and
runs microbatches of the number and size that so many stages have. So the measurement
includes the cost of few rows, few threads, shared memory bandwidth and the code around the layers.
No more processes run than there are processors. Messages are measured between two stages that have
next to nothing to compute. staged_step.py uses the results.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.cluster.environment import cores
from stratagem.data.shares import rows, tensors_in
from stratagem.plan.layer_profile import reason
from stratagem.plan.profile import Profile, StageTime
from stratagem.rules.schedules import SCHEDULES
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.training.dry_run import DryRun
from stratagem.training.layer_graph import LayerGraph, trace
from stratagem.training.replica import current_replica
from stratagem.training.stage import Stage, StageChannels, cut

_SECONDS, _MOST, _TRIES = 0.3, 40, 7
#: the most replicas whose rows a process computes, for its deferred weight gradients
_ROWS = 4
_MESSAGES = 32


class _Clock:
    """Seconds of each kind of operation in one batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, list[float]]] = []

    def time(self, kind: str, work: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        found = work(*args)
        self.batches[-1].setdefault(kind, []).append(time.perf_counter() - began)
        return found

    def typical(self, kind: str) -> float:
        """The mean seconds of an operation: late ones count, since they delay other stages."""
        seen = self.batches[1:] or self.batches  # the first one is for warming up
        each = [statistics.fmean(b[kind]) for b in seen if b.get(kind)]
        return statistics.fmean(each) if each else 0.0


class _TimedStage(Stage):
    clock: _Clock

    def _forward(self, *args: Any) -> None:
        self.clock.time("F", super()._forward, *args)

    def _backward(self, *args: Any) -> None:
        self.clock.time("B", super()._backward, *args)

    def play(self, ops: Any, *args: Any) -> None:
        def settle() -> None:
            self.gradients.__class__.settle(self.gradients)

        vars(self.gradients)["settle"] = lambda: self.clock.time("late", settle)
        super().play(ops, *args)


def _judge(m: int, output: Any) -> Tensor:
    return sum((t.sum() for t in tensors_in(output) if t.is_floating_point()), torch.zeros(()))


def with_stages(measured: Profile, trial: DryRun, given: Any, many: Sequence[int]) -> Profile:
    """Add the seconds of stages' operations with `many` processes, if the model can be split."""
    if not many or not measured.layers:
        return measured
    try:
        return _with_stages(measured, trial, given, many)
    except Exception as problem:
        return replace(measured, layers=(), unpiped=reason(problem))


def _with_stages(measured: Profile, trial: DryRun, given: Any, many: Sequence[int]) -> Profile:
    assert trial.inputs is not None and trial.arguments is not None
    x, batch = trial.inputs(given), measured.batch
    names = [str(node.target) for node in trial.layers(trial.module, x).inputs]
    whole = trial.arguments(names, rows(x, 0, batch))
    played = (trial.module, trial.layers, trial.autocast, names, whole, batch)
    times: list[StageTime] = []
    operation = 0.0
    for n in many:
        strategy = MirroredStrategy([f"cpu:{i}" for i in range(min(n, cores()))])
        try:
            if n == 2 <= cores():
                operation = max(strategy.run(_hand_over))
            for alone in (False, True):
                timed = partial(_timed, strategy, n, played, alone)
                times += [timed(each.pieces) for each in measured.layers]
        finally:
            strategy.close()
    return replace(measured, stage_times=tuple(times), operation=operation)


def _timed(
    strategy: MirroredStrategy, n: int, played: tuple[Any, ...], alone: bool, pieces: int
) -> StageTime:
    """Measure a stage's operations; the slowest process counts."""
    found = strategy.run(_play, *played, n, pieces, alone)
    forward, backward, late = (max(kind) for kind in zip(*found, strict=True))
    return StageTime(n, pieces, forward, backward, late, alone)


def _play(
    module: nn.Module,
    layers: Callable[[Any, Any], LayerGraph],
    autocast: Callable[[], AbstractContextManager[Any]],
    names: list[str],
    given: list[Any],
    batch: int,
    n: int,
    pieces: int,
    alone: bool,
) -> tuple[float, float, float]:
    """On each process: seconds of a forward, a backward and the deferred weight gradients.

    Weight gradients are deferred to the end of a batch of n stages.
    """
    replica, clock = current_replica(), _Clock()
    module.train()
    graph = layers(module, dict.fromkeys(names))
    parts = cut(graph, [0])
    stage = _TimedStage(graph, parts, 0, StageChannels(parts, 1, replica.collective), autocast)
    count = pieces * min(n, _ROWS)
    inputs = [rows(given, 0, -(-batch // pieces))] * count
    ops = list(SCHEDULES["1f1b"](0, 1, count, 1))
    stage.clock = clock
    replica.barrier()
    end = time.perf_counter() + _SECONDS
    while not (alone and replica.index) and len(clock.batches) < _MOST:
        if clock.batches and time.perf_counter() > end:
            break
        clock.batches.append({})
        for param in graph.module.parameters():
            param.grad = None
        stage.run(ops, inputs, list(range(len(inputs))), _judge)
    replica.barrier()
    return clock.typical("F"), clock.typical("B"), clock.typical("late")


def _hand_over() -> float:
    """On each of two processes: seconds of an operation that computes almost nothing.

    So it is the time of messages and of the code around them.
    """
    replica, times = current_replica(), []
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    graph = trace(net, torch.zeros(1, 1))
    parts = cut(graph, [0, 1])
    stage = Stage(graph, parts, replica.index, StageChannels(parts, 2, replica.collective))
    x = [[torch.zeros(1, 1)]] * _MESSAGES
    for _ in range(_TRIES):
        replica.barrier()
        began = time.perf_counter()
        ops = SCHEDULES["1f1b"](replica.index, 2, _MESSAGES, 1)
        stage.run(ops, x, list(range(_MESSAGES)), _judge)
        replica.barrier()
        times.append((time.perf_counter() - began) / (2 * (_MESSAGES + 1)))
    return statistics.median(times[1:])
