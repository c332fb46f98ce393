"""Measure layers that are divided over processes, and recurrent layers cut into chunks of time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from stratagem.data.shares import rows, with_tensors
from stratagem.errors import NotDistributable, ReplicaFailed, UsageError
from stratagem.plan.profile import DividedLayers, LayerTable, Profile
from stratagem.rules.layer_split import LayerCost
from stratagem.state.divided_update import DividedUpdate
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.training.column_plan import fast_recurrence, plan_columns
from stratagem.training.divided_model import TRIED
from stratagem.training.dry_run import DryRun
from stratagem.training.isolated_run import dry_run
from stratagem.training.layer_costs import STATES, LayerMeter, saved_tensors
from stratagem.training.layer_graph import LayerGraph, shapes_of, trace
from stratagem.training.replica import current_replica
from stratagem.training.tensor_plan import TensorPlan, Use, make_plan
from stratagem.training.tensor_program import (
    OPENED,
    OwnParts,
    divided_program,
    gathered_layers,
)
from stratagem.wire.shared_memory import sharing
from stratagem.wire.shared_scratch import SharedScratch

#: the number of processes that the plan is made for
_PROCESSES = 2
_ROUNDS = 3
#: passes of two processes that divide the layers, as many as these seconds allow; the first quarter
#: is for warming up
_SECONDS, _LEAST, _MOST = 4.0, 4, 16


def divided_layers(graph: LayerGraph, given: Sequence[Any]) -> DividedLayers:
    """The layers that `TensorParallelStrategy` would divide, in a graph traced with `OPENED`."""
    shapes = _shapes(graph, given)
    plan = make_plan(graph, _PROCESSES, {}, shapes)
    costs = LayerMeter(graph).measure(given)
    layers = zip(costs, graph.layers, strict=True)
    found = [(cost, _use(plan, layer.nodes)) for cost, layer in layers]
    crossing = list(_crossing(graph, plan, shapes))

    def share(name: str, divided: Sequence[LayerCost]) -> float:
        whole = sum(getattr(cost, name) for cost in costs)
        return sum(getattr(cost, name) for cost in divided) / whole if whole else 0.0

    growth = 2.0
    if wholes := [i for i, (_, use) in enumerate(found) if use.how == "whole"]:
        more = LayerMeter(graph).measure([with_tensors(each, _twice) for each in given])
        once, twice = (sum(each[i].seconds for i in wholes) for each in (costs, more))
        growth = min(max(twice / once, 1.0), 2.0) if once else 2.0
    parts = [cost for cost, use in found if use.how != "whole"]
    entered = [cost for cost, use in found if use.given is not None]
    return DividedLayers(
        share("seconds", parts),
        share("fixed", parts),
        share("activation", entered),
        sum(crossing),
        len(crossing),
        growth=growth,
    )


def _twice(tensor: Tensor) -> Tensor:
    """Return the rows twice, one copy after the other."""
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor


def with_played(
    measured: Profile, trial: DryRun, given: Any, say: Callable[[str], None]
) -> Profile:
    """Add the seconds of two processes that divide the layers, or the reason why they cannot."""
    assert measured.divided is not None
    # at most: where no layer is divided, each process computes both replicas' rows
    each = 2 * (measured.single_thread or measured.compute)
    passes = min(max(_LEAST, int(_SECONDS / max(each, 1e-9))), _MOST)
    if passes * each > _SECONDS:
        say(f"{passes} passes with the layers divided over {_PROCESSES}, {passes * each:.0f}s")
    try:
        played, update = played_seconds(trial, given, passes)
    except Exception as problem:
        return replace(measured, divided=None, undivided=reason(problem))
    return replace(measured, divided=replace(measured.divided, played=played, update=update))


def reason(problem: Exception) -> str:
    """Say why a strategy cannot be used; its failure must not end the plan of all others."""
    if isinstance(problem, NotDistributable | UsageError):
        return str(problem)
    lines = str(problem).strip().splitlines() or [""]
    said = f"{type(problem).__name__}: {lines[0]}"
    if isinstance(problem, ReplicaFailed):  # its own error is at the end
        said = lines[-1]
    return f"it failed when it was measured, with {said}"


def played_seconds(trial: DryRun, given: Any, passes: int) -> tuple[float, float]:
    """Measure two CPU processes that divide the layers: forward and backward, and the update."""
    assert trial.inputs is not None and trial.arguments is not None
    batch = with_tensors(given, _twice)
    x = trial.inputs(batch)
    names = [str(node.target) for node in trace(trial.module, x, OPENED).inputs]
    inputs = trial.arguments(names, x)
    work = (trial.module, trial.optimizer, trial.loss, trial.autocast, names, inputs, batch, passes)
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(_PROCESSES)])
    try:
        found: list[tuple[float, float]] = strategy.run(_play, *work)
        return max(played for played, _ in found), max(update for _, update in found)
    finally:
        strategy.close()


def _play(
    module: nn.Module,
    optimizer: Optimizer | None,
    loss: Callable[[Any], Tensor],
    autocast: Callable[[], AbstractContextManager[Any]],
    names: list[str],
    inputs: list[Any],
    batch: Any,
    passes: int,
) -> tuple[float, float]:
    """On each process: the median seconds of passes and updates, with waits for the other process.

    The trial computes its loss, under its autocast, of the divided layers instead of the module's.
    """
    replica, times, updates = current_replica(), list[float](), list[float]()
    module.train()
    graph = trace(module, dict.fromkeys(names), OPENED)
    with autocast():
        plan = make_plan(graph, _PROCESSES, {}, _shapes(graph, rows(inputs, 0, TRIED)))
    parts = OwnParts(plan, list(module.parameters()), replica.index, _PROCESSES)
    collective = sharing(replica.collective)
    program = divided_program(graph, plan, parts, SharedScratch(collective))
    update = None if optimizer is None else DividedUpdate(optimizer, parts.own, collective)
    own = vars(module)
    before = own.get("forward")
    own["forward"] = lambda *args, **kwargs: program(*inputs)
    try:
        for _ in range(passes):
            for param in (*module.parameters(), *(part.leaf for part in parts.own)):
                param.grad = None
            replica.barrier()
            started = time.perf_counter()
            loss(batch).backward()  # type: ignore[no-untyped-call]
            times.append(time.perf_counter() - started)
            if update is not None:
                started = time.perf_counter()
                update.step()
                updates.append(time.perf_counter() - started)
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before
    warm = passes // 4
    return statistics.median(times[warm:]), statistics.median(updates[warm:] or [0.0])


def _shapes(graph: LayerGraph, given: Sequence[Any]) -> dict[fx.Node, torch.Size]:
    with dry_run(*graph.module.modules()):
        return shapes_of(graph, given)


def _use(plan: TensorPlan, nodes: Sequence[fx.Node]) -> Use:
    """How the layer with these nodes is computed."""
    return next((plan.uses[n] for n in nodes if n.op == "call_module" and n in plan.uses), Use())


def _crossing(
    graph: LayerGraph, plan: TensorPlan, shapes: dict[fx.Node, torch.Size]
) -> Iterator[int]:
    """Bytes of each value that is all-reduced or gathered, forward and backward."""
    gathered = gathered_layers(graph, plan)
    size = next(graph.module.parameters()).itemsize
    for node, use in plan.uses.items():
        if node.op != "call_module":
            continue
        layer = graph.module.get_submodule(str(node.target))
        made = math.prod(shapes.get(node, ())) * size
        first: Any = node.args[0] if node.args else None
        taken = math.prod(shapes[first]) * size if first in shapes else made
        attends = isinstance(layer, nn.MultiheadAttention)
        if use.how == "rows" or (attends and use.how == "columns"):
            yield made if node in shapes else taken
        if node in gathered:
            yield made
        if use.how == "columns" and not isinstance(layer, nn.Embedding):
            yield taken


def chunk_tables(
    graph: LayerGraph, given: Sequence[Any], costs: Sequence[LayerCost], pieces: Sequence[int]
) -> tuple[tuple[LayerTable, ...], tuple[LayerCost, ...]]:
    """Measure the recurrent layers on a whole sequence, a half of it, and so on.

    Also returns the costs of the other layers. Both are empty for a model that `columns=` refuses.
    """
    try:
        plan = plan_columns(graph, _PROCESSES)
    except (NotDistributable, UsageError):
        return (), ()
    shape = _shapes(graph, given)[plan.entry]
    cut = [op.layer for op in plan.ops if op.layer is not None]
    tables = [
        LayerTable(n, tuple(_cost(layer, plan.axis, shape, n) for layer in cut))
        for n in pieces
        if shape[plan.axis] >= n * _PROCESSES
    ]
    rest = [
        cost
        for cost, layer in zip(costs, graph.layers, strict=True)
        if not any(_is_recurrent(graph, node) for node in layer.nodes)
    ]
    return tuple(tables), tuple(rest)


def _is_recurrent(graph: LayerGraph, node: fx.Node) -> bool:
    called = node.op == "call_module"
    return called and isinstance(graph.module.get_submodule(str(node.target)), nn.RNNBase)


def _cost(layer: nn.RNNBase, axis: int, shape: torch.Size, pieces: int) -> LayerCost:
    """Measure one layer on a chunk of time: the fastest of a few rounds.

    The processes share one batch: a chunk has the rows of all of them, and is shorter by the same
    factor.
    """
    params = list(layer.parameters())
    size = list(shape[:2])
    size[axis] = max(size[axis] // (pieces * _PROCESSES), 1)
    size[1 - axis] *= _PROCESSES
    kept: list[int] = []
    x = torch.randn(*size, layer.input_size, dtype=params[0].dtype, requires_grad=True)
    best = (math.inf, math.inf)
    for _ in range(_ROUNDS):
        kept.clear()
        started = time.thread_time()
        with saved_tensors(lambda tensor: kept.append(tensor.nbytes)), fast_recurrence():
            output, _ = layer(x)
        forward = time.thread_time() - started
        torch.autograd.grad(output.sum(), [x, *(p for p in params if p.requires_grad)])
        best = min(best, (time.thread_time() - started, forward))
    held = sum(p.nbytes * (1 + STATES * p.requires_grad) for p in params)
    return LayerCost(best[0], held, sum(kept), output.nbytes, best[1])
