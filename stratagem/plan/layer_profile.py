"""Measure the memory of a model and the cost of its layers, for strategies that divide it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.shares import rows
from stratagem.plan.divided_profile import chunk_tables, divided_layers, reason
from stratagem.plan.machine import one_thread
from stratagem.plan.profile import Footprint, LayerTable, Profile
from stratagem.training.dry_run import DryRun
from stratagem.training.layer_costs import LayerMeter, saved_tensors
from stratagem.training.layer_graph import trace
from stratagem.training.settings import Pipeline
from stratagem.training.stage_plan import check_layers
from stratagem.training.tensor_program import OPENED

#: numbers of microbatches or chunks for each stage
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
        undivided=trial.undivided,
        sharded_here=trial.sharded_here,
        one_set=trial.one_set,
    )
    if trial.inputs is None or trial.arguments is None:
        return found
    if measured.device != "cpu":
        why = "stages, and processes that divide layers, are CPU processes so far."
        return replace(found, unpiped=trial.unpiped or why, undivided=trial.undivided or why)
    # as for processes that fill a machine; few rows gain little by more threads
    with one_thread(), trial.autocast():
        found = found if trial.unpiped else _with_stages(found, trial, batch)
        return found if trial.undivided else _with_divided(found, trial, batch)


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
    """Add all layers' costs for each size of microbatch or chunk, or why there are no stages."""
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
        whole = trial.arguments(names, rows(x, 0, found.batch))
        chunks, rest = chunk_tables(graph, whole, tables[0].costs, _PIECES)
    except Exception as problem:
        return replace(found, unpiped=reason(problem))
    return replace(found, layers=tuple(tables), chunks=chunks, unchunked=rest)


def _with_divided(found: Profile, trial: DryRun, batch: Any) -> Profile:
    """Add the share of layers that can be divided, or the reason why none can."""
    assert trial.inputs is not None and trial.arguments is not None
    x = trial.inputs(batch)
    try:
        graph = trace(trial.module, x, OPENED)
        names = [str(node.target) for node in graph.inputs]
        given = trial.arguments(names, rows(x, 0, found.batch))
        return replace(found, divided=divided_layers(graph, given))
    except Exception as problem:
        return replace(found, undivided=reason(problem))
