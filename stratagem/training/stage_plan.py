"""How a model is split over the devices of a pipeline: the number of microbatches, and the first
layer of each stage. Measured on the first batch, or named by the user."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from stratagem.capabilities import sentence
from stratagem.compat.torch_names import BatchNorm
from stratagem.data.shares import tensors_in
from stratagem.errors import NotDistributable, UsageError
from stratagem.rules.layer_split import LayerCost, slowest, split_layers
from stratagem.rules.schedules import SCHEDULES, kept
from stratagem.training.isolated_run import dry_run
from stratagem.training.layer_costs import LayerMeter, held_bytes
from stratagem.training.layer_graph import LayerGraph, run_graph
from stratagem.training.settings import Pipeline
from stratagem.training.stage import cut

log = logging.getLogger("stratagem")

#: rows on which the layers are compared with the whole model
_TRIED = 5

#: the inputs of the first so many rows of a batch
RowsOf = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class StagePlan:
    """The split that the chief sends to the other devices."""

    microbatches: int
    #: the first layer of each part
    firsts: tuple[int, ...]


def check_layers(graph: LayerGraph, pipeline: Pipeline, devices: int) -> None:
    """Refuse a model that this pipeline cannot split, before anything is started."""
    parts = devices * pipeline.parts
    if len(graph.layers) < parts:
        names = ", ".join(layer.name for layer in graph.layers)
        raise UsageError(
            f"the model has {len(graph.layers)} layers that can be cut apart ({names}), and "
            f"{parts} stages need one each; name fewer devices."
        )
    named = None if pipeline.split is None else named_split(graph, pipeline.split, parts)
    if pipeline.memory is not None:
        _check_memory(held_bytes(graph), pipeline, parts, named)
    pieces = pipeline.microbatches != 1 or pipeline.data > 1
    many = pieces and pipeline.batch_norm is None
    for name, part in graph.module.named_modules():
        if getattr(part, "sparse", False) and pipeline.data > 1:
            raise NotDistributable(sentence("mesh", "sparse gradients", layer=name))
        if isinstance(part, BatchNorm) and many and pipeline.data > 1:
            raise NotDistributable(sentence("mesh", "BatchNorm", layer=name))
        if isinstance(part, BatchNorm) and many:
            raise NotDistributable(sentence("stages", "BatchNorm", layer=name))


def _check_memory(
    held: Sequence[int], pipeline: Pipeline, parts: int, named: Sequence[int] | None
) -> None:
    """Refuse layers that take too much of a stage before there is any activation."""
    assert pipeline.memory is not None
    costs = [LayerCost(each) for each in held]  # so that the "slowest" stage is the largest
    largest = slowest(costs, named or split_layers(costs, parts) or [0])
    if largest > pipeline.memory / pipeline.parts:
        raise NotDistributable(
            f"the model's layers take {sum(held) / 1e6:.3g} MB with gradients and two optimizer "
            f"states, the largest of {parts} stages {largest / 1e6:.3g} MB, and memory= allows "
            f"{pipeline.memory / pipeline.parts / 1e6:.3g} MB; name more devices, or allow more "
            "memory."
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that may need the parameters of all stages at once."""
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS) or not kind.__module__.startswith("torch."):
        raise NotDistributable(
            sentence("stages", "optimizers of whole parameters", optimizer=kind.__name__)
        )


def named_split(graph: LayerGraph, names: Sequence[str], parts: int) -> tuple[int, ...]:
    """The first layers of the parts that begin with these modules."""
    if len(names) != parts - 1:
        raise UsageError(
            f"split has {len(names)} names, and {parts} stages begin with {parts - 1} of them: "
            "each but the first with one."
        )
    firsts = (0, *(graph.first_of(name) for name in names))
    for before, after, name in zip(firsts, firsts[1:], names, strict=False):
        if after <= before:
            raise UsageError(
                f"split has {name!r}, which does not run behind the stage before it; name layers "
                "in the order in which they run, and none that is the first."
            )
    return firsts


@torch.no_grad()
def prove(graph: LayerGraph, total: int, inputs: RowsOf) -> tuple[bool, list[str]]:
    """Refuse a model whose layers, one after another, are not what its forward computes: for some
    rows, and for one less. Returns whether it draws random numbers, and which buffers it writes."""
    draws, written = False, []
    names = [str(node.target) for node in graph.inputs]
    for count in {min(total, _TRIED), max(min(total, _TRIED) - 1, 1)}:
        given = inputs(count)
        with dry_run(*graph.module.modules()) as journal:
            whole = tensors_in([graph.module(**dict(zip(names, given, strict=True)))])
            same = alike(whole, tensors_in([run_graph(graph, given)]))
            written += [n for n, b in graph.module.named_buffers() if journal.was_written(b)]
        draws |= journal.draws
        if not same:
            raise NotDistributable(
                f"the layers of {type(graph.module).__name__}, one after another, do not give what "
                "its forward gives, so that forward does something that was not seen when it was "
                "split (a global, a random number, the number of rows); put that part into a "
                "submodule of its own which is not torch's, with a line that depends on values."
            )
    return draws, written


@torch.no_grad()
def prove_rows(graph: LayerGraph, total: int, inputs: Callable[[int, int], Sequence[Any]]) -> None:
    """Refuse a model in which a row's output depends on other rows: microbatches separate them."""
    count = min(total, _TRIED)
    cuts = [(0, count // 2), (count // 2, count)] if count > 1 else [(0, count)]
    with dry_run(*graph.module.modules()):
        whole = tensors_in([run_graph(graph, inputs(0, count))])
        pieces = [tensors_in([run_graph(graph, inputs(*each))]) for each in cuts]
        same = alike(
            whole, (torch.cat([*map(torch.atleast_1d, p)]) for p in zip(*pieces, strict=True))
        )
    if not same:
        raise NotDistributable(
            f"in {type(graph.module).__name__} the rows of a batch look at each other, or the "
            "output is not a row for each example, so that microbatches do not give what a batch "
            "gives; use microbatches=1, or say what is a row (batch first)."
        )


def alike(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether two sequences of tensors are equal to rounding."""
    return all(
        one.shape == other.shape and torch.allclose(one, other, 1e-4, 1e-6, equal_nan=True)
        for one, other in zip_longest(some, others, fillvalue=torch.empty(0))
    )


def make_plan(
    graph: LayerGraph, pipeline: Pipeline, devices: int, rows: int, inputs: RowsOf
) -> tuple[StagePlan, str]:
    """On the chief: measure the layers and choose a split; returns also its table."""
    best: tuple[float, StagePlan, list[LayerCost]] | None = None
    for microbatches in _candidates(pipeline.microbatches, devices, rows):
        costs = LayerMeter(graph).measure(inputs(-(-rows // microbatches)))
        firsts = _firsts(graph, pipeline, devices, microbatches, costs)
        if firsts is None:
            continue
        step = (pipeline.parts * microbatches + devices - 1) * slowest(costs, firsts)
        if best is None or step < best[0]:
            plan = StagePlan(pipeline.microbatches or microbatches, tuple(firsts))
            best = (step, plan, costs)
    if best is None:
        which = "no split" if pipeline.split is None else "not the split= given"
        raise NotDistributable(
            f"{which} of the model's {len(graph.layers)} layers over {devices} devices fits into "
            f"{(pipeline.memory or 0) / 1e6:.3g} MB each, activations included; name more "
            "devices, or allow more memory."
        )
    return best[1], _table(graph, best[1], devices, best[2])


def say_plan(pipeline: Pipeline, plan: StagePlan, table: str) -> None:
    """Log the split; as a warning only where the user has not named it."""
    level = logging.WARNING if pipeline.split is None else logging.INFO
    log.log(
        level,
        "a pipeline of %d microbatches a batch; of one microbatch:\n%s",
        plan.microbatches,
        table,
    )


def _candidates(asked: int | None, devices: int, rows: int) -> list[int]:
    """Numbers of microbatches to try; a batch has no more than rows."""
    if asked is not None:
        return [max(min(asked, rows), 1)]
    few = [n for n in (devices, 2 * devices, 4 * devices) if n <= rows]
    return few or [max(rows, 1)]


def _firsts(
    graph: LayerGraph,
    pipeline: Pipeline,
    devices: int,
    microbatches: int,
    costs: Sequence[LayerCost],
) -> Sequence[int] | None:
    parts = devices * pipeline.parts
    schedule = SCHEDULES[pipeline.schedule]
    held = [kept(schedule(d, devices, microbatches, pipeline.parts)) for d in range(devices)]
    # a device's parts share what it keeps
    each = [-(-held[part % devices] // pipeline.parts) for part in range(parts)]
    limit = inf if pipeline.memory is None else pipeline.memory / pipeline.parts
    if pipeline.split is None:
        return split_layers(costs, parts, each, limit)
    firsts = named_split(graph, pipeline.split, parts)
    stages = zip(firsts, [*firsts[1:], len(costs)], each, strict=True)
    taken = (sum(c.fixed + n * c.activation for c in costs[i:j]) for i, j, n in stages)
    return firsts if max(taken) <= limit else None


def _table(graph: LayerGraph, plan: StagePlan, devices: int, costs: Sequence[LayerCost]) -> str:
    """A line for each stage: layers, milliseconds, megabytes, and what it sends to later stages."""
    head = ("stage", "device", "layers", "ms", "MB", "hands on")
    lines = [head]
    made_by = {n.name: layer.name for layer in graph.layers for n in layer.nodes}
    for part in cut(graph, plan.firsts):
        names = [graph.layers[i].name for i in part.layers]
        layers = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        ms = sum(costs[i].seconds for i in part.layers) * 1e3
        size = sum(costs[i].fixed for i in part.layers) / 1e6
        over = costs[part.layers[-1]].crossing / 1e6
        sent = [
            f"{', '.join(dict.fromkeys(made_by[name] for name in names))} to {to}"
            for to, names in part.sends.items()
            if names
        ]
        row = (str(part.index), str(part.index % devices), layers, f"{ms:.2f}", f"{size:.1f}")
        lines.append((*row, f"{'; '.join(sent)}, {over:.2f} MB" if sent else "-"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rows = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(row.rstrip() for row in rows)
