"""Measure the memory of a model and the cost of its layers, for strategies that divide it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.shares import rows
from stratagem.errors import NotDistributable, ReplicaFailed, UsageError
from stratagem.plan.machine import one_thread
from stratagem.plan.profile import Footprint, LayerTable, Profile
from stratagem.training.dry_run import DryRun
from stratagem.training.layer_costs import LayerMeter, saved_tensors
from stratagem.training.settings import Pipeline
from stratagem.training.stage_plan import check_layers

#: numbers of microbatches for each stage
_PIECES = (1, 2, 4)


def with_layers(
    measured: Profile, trial: DryRun, batch: Any, params: list[nn.Parameter]
) -> Profile:
    """Add the model's memory and, if it can be split, the costs of its layers to the profile.

    `batch` is the one of the measurement; the optimizer has made a step, so that its state exists.
    """
    held = footprint(trial, batch, params)
    found = replace(
        measured,
        footprint=held,
        unpiped=trial.unpiped,
        unsharded=trial.unsharded,
        sharded_here=trial.sharded_here,
        one_set=trial.one_set,
    )
    if trial.inputs is None or trial.arguments is None:
        return found
    if measured.device != "cpu":
        return replace(found, unpiped=trial.unpiped or "stages are CPU processes so far.")
    # as for processes that fill a machine; few rows gain little by more threads
    with one_thread(), trial.autocast():
        return found if trial.unpiped else _with_stages(found, trial, batch)


def footprint(trial: DryRun, batch: Any, params: list[nn.Parameter]) -> Footprint:
    """The memory of a step on one device."""
    module, optimizer = trial.module, trial.optimizer
    own = sum(t.nbytes for t in {*module.parameters(), *module.buffers()})
    gradients = sum(p.nbytes for p in params)
    values: Iterable[Any] = trial.beside  # Keras' optimizers are not torch's
    if optimizer is not None:
        values = (v for each in optimizer.state.values() for v in each.values())
    states = sum(v.nbytes for v in values if isinstance(v, Tensor))
    return Footprint(own, gradients, states, _kept(trial, batch))


def _kept(trial: DryRun, batch: Any) -> int:
    """Bytes that a forward saves for its backward, without parameters; each storage once."""
    known = {t.untyped_storage().data_ptr() for t in trial.module.parameters()}
    found: dict[int, int] = {}

    def see(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.layout == torch.strided and storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()

    with saved_tensors(see):
        loss = trial.loss(batch)
    del loss
    return sum(found.values())


def _with_stages(found: Profile, trial: DryRun, batch: Any) -> Profile:
    """Add all layers' costs for each size of microbatch, or why there are no stages."""
    assert trial.inputs is not None and trial.arguments is not None
    x = trial.inputs(batch)
    try:
        graph = trial.layers(trial.module, x)
        check_layers(graph, Pipeline(), 2)
        names = [str(node.target) for node in graph.inputs]
        meter, tables = LayerMeter(graph), []
        for pieces in _PIECES:
            if pieces <= found.batch:
                given = trial.arguments(names, rows(x, 0, -(-found.batch // pieces)))
                tables.append(LayerTable(pieces, tuple(meter.measure(given))))
    except Exception as problem:
        return replace(found, unpiped=reason(problem))
    return replace(found, layers=tuple(tables))


def reason(problem: Exception) -> str:
    """Say why a strategy cannot be used; its failure must not end the plan of all others."""
    if isinstance(problem, NotDistributable | UsageError):
        return str(problem)
    lines = str(problem).strip().splitlines() or [""]
    said = f"{type(problem).__name__}: {lines[0]}"
    if isinstance(problem, ReplicaFailed):  # its own error is at the end
        said = lines[-1]
    return f"it failed when it was measured, with {said}"
