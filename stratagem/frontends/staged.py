"""A training step through the stages of a pipeline, with the result of one device.

Every device has the whole batch, or its row's share (training/mesh_grid.py), and runs its own
layers on one microbatch after another. The model is in shared memory; over several machines, each
process holds its own part (state/parted_model.py). The loss is divided by the whole batch's
denominator, so microbatches may differ in size. Each device updates its own parameters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.capabilities import sentence
from stratagem.data.shares import rows
from stratagem.errors import NotDistributable
from stratagem.frontends.adapter import Training
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.microbatches import MicroBatches
from stratagem.frontends.sources import Portion
from stratagem.frontends.steps import OneDevice
from stratagem.rules.chunk_choice import ChunkChoice
from stratagem.rules.schedules import SCHEDULES
from stratagem.state.parted_model import PartedModel
from stratagem.state.shared_model import SharedModel
from stratagem.training import setup
from stratagem.training.column_plan import plan_columns
from stratagem.training.columns import ColumnChannels, ColumnStage
from stratagem.training.layer_graph import LayerGraph, trace
from stratagem.training.mesh_grid import MeshGrid, OpenStage, open_stages, refuse_strays
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica
from stratagem.training.settings import Pipeline
from stratagem.training.stage_plan import (
    RowsOf,
    StagePlan,
    check_layers,
    check_optimizer,
    make_plan,
    prove,
    say_plan,
)
from stratagem.wire.tree import broadcast_tree, gather_tree

#: what a plan depends on: settings, rows, modes of modules and names of layers
_PlanKey = tuple[Pipeline, int, tuple[bool, ...], tuple[str, ...]]
_plans: weakref.WeakKeyDictionary[nn.Module, tuple[_PlanKey, StagePlan]] = (
    weakref.WeakKeyDictionary()
)


def check(job: Fit, devices: int) -> None:
    """Raise, before anything starts, if a pipeline cannot give the result of one device."""
    pipeline, recipe = job.settings.pipeline, job.recipe
    assert pipeline is not None
    devices //= pipeline.data
    if recipe.autocast is torch.float16:
        raise NotDistributable(sentence("stages", "float16"))
    if recipe.jit_compile:
        raise NotDistributable(sentence("stages", "jit_compile"))
    check_optimizer(job.optimizer)
    job.module.train()
    graph = trace(job.module, job.source.known_input())
    if pipeline.columns is not None:
        plan_columns(graph, devices)
    else:
        check_layers(graph, pipeline, devices)


class Staged(OneDevice):
    """The step of one device of a pipeline, or of one row of a mesh."""

    def __init__(self, training: Training, replica: Replica) -> None:
        module, optimizer, _, settings = training
        assert settings.pipeline is not None
        self.grid, self._pipeline = MeshGrid(replica, settings.pipeline.data), settings.pipeline
        super().__init__(training, self.grid.place)
        collective = self.grid.place.collective
        self._schedule = SCHEDULES[self._pipeline.schedule]
        tensors = [*module.parameters(), *module.buffers()]
        form: Any = SharedModel if collective.shares_memory else PartedModel
        self._home: SharedModel | PartedModel = form(tensors, optimizer, collective)
        self._opened: OpenStage | None = None
        self._owned: list[nn.Parameter] = []
        self._microbatches = 1
        self._modes: list[int] = []

    # --- set-up -----------------------------------------------------------------------------

    def _begin(self, batch: Portion) -> OpenStage:
        """Trace the model on the first batch, measure and split its layers. Collective."""
        graph = trace(self.module, batch.x)
        self._inputs = [str(node.target) for node in graph.inputs]
        criterion = getattr(self.recipe.loss, "function", None)
        in_loss: set[Tensor] = set()  # parameters that the loss shares with the model
        if isinstance(criterion, nn.Module):
            in_loss = {*criterion.parameters(), *criterion.buffers()}
        split = self._split_layers if self._pipeline.columns is None else self._split_columns
        opened = split(graph, batch, in_loss)
        self._owned = [p for p in self._params if p in opened.owned]
        self._home.own(opened.owned, opened.used)
        return opened

    def _split_layers(self, graph: LayerGraph, batch: Portion, in_loss: set[Tensor]) -> OpenStage:
        """Split by layers, as rank 0 plans it for its own share. Collective."""
        check_layers(graph, self._pipeline, self.replica.count)
        mine = None
        if self.grid.everybody.rank == 0:
            plan = self._plan(graph, share_of_row(batch, self.grid))
            mine = [plan.microbatches, list(plan.firsts)]
        self._microbatches, firsts = broadcast_tree(self.grid.everybody, mine)
        return open_stages(graph, firsts, self.replica, self._params, self.autocast, in_loss)

    def _split_columns(self, graph: LayerGraph, batch: Portion, in_loss: set[Tensor]) -> OpenStage:
        """Split recurrent layers, and their sequence into chunks of time. Collective."""
        place, chunks = self.replica, self._pipeline.columns
        plan = plan_columns(graph, place.count)
        assert chunks is not None
        if place.leads:
            prove(graph, batch.total, self._rows_of(batch))
        channels = ColumnChannels(place.count, place.collective)
        choice = ChunkChoice(place.count, chunks or None, rows=self._pipeline.by_rows)
        stage = ColumnStage(plan, place.index, choice, channels, self.autocast)
        users = [plan.tensors(device) for device in range(place.count)]
        users[-1] |= in_loss
        return OpenStage(stage, users, place.count - 1, place, self._params)

    def _plan(self, graph: LayerGraph, portion: Portion) -> StagePlan:
        modes = tuple(part.training for part in self.module.modules())
        layers = tuple(layer.name for layer in graph.layers)
        known, key = _plans.get(self.module), (self._pipeline, portion.total, modes, layers)
        if known is not None and known[0] == key:
            return known[1]

        inputs = self._rows_of(portion)
        prove(graph, portion.total, inputs)
        with self.autocast():
            plan, table = make_plan(
                graph, self._pipeline, self.replica.count, portion.total, inputs
            )
        say_plan(self._pipeline, plan, table)
        _plans[self.module] = (key, plan)
        return plan

    def _rows_of(self, portion: Portion) -> RowsOf:
        return lambda count: in_order(self._inputs, rows(portion.x, 0, count))

    # --- one step ---------------------------------------------------------------------------

    def here(self, portion: Portion) -> Portion:
        """The portion, moved to this device."""
        if not self._elsewhere:
            return portion
        x, y, weight = to_device((portion.x, portion.y, portion.weight), self.device)
        return Portion(x, y, weight, portion.examples, portion.total)

    def take(self, portion: Portion, last: bool) -> None:
        batch = self.here(portion)
        modes = [*(part.training for part in self.module.modules()), self.followed()]
        if self._opened is None or modes != self._modes:  # a trace is valid for these modes only
            if self._opened is not None:  # another split moves parameters between devices
                self.bring_home()
                setup.align_state(self.optimizer, self.replica)
            self._opened, self._modes = self._begin(batch), modes
        opened = self._opened
        self._home.leave_home()
        self._waiting += 1
        apply = last or self._waiting == self.recipe.accumulate
        own = share_of_row(batch, self.grid)
        pieces = MicroBatches(batch, own, self._microbatches, self.recipe)
        inputs = [in_order(self._inputs, pieces.x(m)) for m in range(pieces.count)]
        seeds, rng = torch.randint(2**62, (pieces.count,)).tolist(), torch.get_rng_state()
        place = self.replica
        ops = self._schedule(place.index, place.count, pieces.count, self._pipeline.parts)
        opened.stage.run(ops, inputs, seeds, pieces.judge)
        torch.set_rng_state(rng)
        if opened.is_last and self.recipe.metrics and pieces.count:
            self.take_in(pieces.output(), own.y)
        if apply:
            self._waiting = 0
            self.before_commit()
            opened.ties.send()
            self.grid.add_up(self._owned)
            refuse_strays(dict(self.module.named_parameters()), opened.owned, place.name)
        self._finish(batch.total, pieces.loss() if opened.is_last else None, apply=apply)

    def _finish(self, total: int, loss: float | None, *, apply: bool) -> None:
        """Exchange the loss and the norm, update, and wait for all replicas."""
        norm = apply and self.recipe.clip_norm is not None
        square = self._square() if norm else 0.0
        found = gather_tree(self.grid.everybody, [loss, square])
        self.tally.add(sum(loss for loss, _ in found if loss is not None), total)
        if not apply:
            return
        if norm:  # each row of the mesh has the whole gradient
            self._clip(math.sqrt(sum(square for _, square in self.grid.own(found))))
        self._step()

    def _step(self) -> None:
        if (limit := self.recipe.clip_value) is not None:
            for param in self._owned:
                if param.grad is not None:
                    param.grad.clamp_(-limit, limit)
        self.optimizer.step()
        self.forget_gradients()
        self._home.updated()

    def _square(self) -> float:
        found = [p.grad.double().square().sum() for p in self._owned if p.grad is not None]
        return float(sum(found))

    def _clip(self, norm: float) -> None:
        """Clip like torch.nn.utils.clip_grad_norm_, by the norm over all devices."""
        limit = self.recipe.clip_norm
        assert limit is not None
        if not norm <= limit:  # also if the norm is NaN
            for param in self._owned:
                if param.grad is not None:
                    param.grad.mul_(limit / (norm + 1e-6))

    # --- end --------------------------------------------------------------------------------

    def take_back(self) -> None:
        self._home.take_back()

    def bring_home(self) -> None:
        self._home.bring_home()

    def close(self) -> None:
        self.forget_gradients()
        self._home.close()

    def leave(self) -> None:
        self.forget_gradients()
        self._home.leave()


def in_order(names: Sequence[str], x: Any) -> list[Any]:
    """Return the inputs of a batch as a list of arguments."""
    if isinstance(x, dict):
        return [x[name] for name in names]
    several = isinstance(x, list | tuple) and not hasattr(x, "_fields")
    return list(x) if several else [x]


def share_of_row(batch: Portion, grid: MeshGrid) -> Portion:
    """Return the share of a batch that this row of the mesh computes."""
    if not grid.has_rows:
        return batch
    first, end = grid.share(batch.total)
    parts: list[Any] = [batch.x, batch.y, batch.weight]
    x, y, weight = rows(parts, first, end)
    return Portion(x, y, weight, end - first, end - first)
