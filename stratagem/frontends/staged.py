"""A training step through the stages of a pipeline, with the result of one device.

Every device has the whole batch and runs its own layers on one microbatch after another. The whole
model lies in shared memory; between machines each has its own part (state/parted_model.py). The
loss of a batch is divided by what one device divides it by, so microbatches need not be of one
size. Each device steps the optimizer on its own parameters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.shares import rows
from stratagem.errors import NotDistributable
from stratagem.frontends.adapter import Training
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.microbatches import MicroBatches
from stratagem.frontends.recipe import Recipe
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
from stratagem.training.mesh_grid import MeshGrid, TiedGradients, devices_of, refuse_strays
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica
from stratagem.training.settings import Pipeline
from stratagem.training.stage import Stage, StageChannels, cut, tensors_of
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

#: settings, rows, the modes of its parts and the layers that a model was measured for
_PlanKey = tuple[Pipeline, int, tuple[bool, ...], tuple[str, ...]]
_plans: weakref.WeakKeyDictionary[nn.Module, tuple[_PlanKey, StagePlan]] = (
    weakref.WeakKeyDictionary()
)


def check(job: Fit, devices: int) -> None:
    """Refuse what a pipeline cannot do as one device does, before anything is started."""
    pipeline, recipe = job.settings.pipeline, job.recipe
    assert pipeline is not None
    devices //= pipeline.data
    if recipe.autocast is torch.float16:
        raise NotDistributable(
            'a pipeline has no gradient scaler, so precision="float16" cannot be used; '
            'precision="bfloat16" needs none.'
        )
    if recipe.jit_compile:
        raise NotDistributable(
            "a pipeline runs the layers of a model one by one, so jit_compile=True cannot be used; "
            "leave it out."
        )
    check_optimizer(job.optimizer)
    job.module.train()
    graph = trace(job.module, job.source.known_input())
    if pipeline.columns is not None:
        plan_columns(graph, devices)
    else:
        check_layers(graph, pipeline, devices)


class Staged(OneDevice):
    """One device of a pipeline."""

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        module, optimizer, _, settings = training
        assert settings.pipeline is not None
        self._collective, self._pipeline = replica.collective, settings.pipeline
        replica.stage = replica.index
        self._schedule = SCHEDULES[self._pipeline.schedule]
        tensors = [*module.parameters(), *module.buffers()]
        form: Any = SharedModel if replica.collective.shares_memory else PartedModel
        self._home: SharedModel | PartedModel = form(tensors, optimizer, replica.collective)
        self._stage: Stage | ColumnStage | None = None
        self._owned: list[nn.Parameter] = []
        self._microbatches = 1
        self._modes: list[int] = []

    # --- coming together --------------------------------------------------------------------

    def _begin(self, portion: Portion) -> Stage | ColumnStage:
        """Trace, measure and split, with the first batch at hand. Collective."""
        rank = self.replica.index
        graph = trace(self.module, portion.x)
        self._inputs = [str(node.target) for node in graph.inputs]
        split = self._in_columns if self._pipeline.columns is not None else self._in_parts
        stage, users = split(graph, portion)
        judged = getattr(self.recipe.loss, "function", None)
        if isinstance(judged, nn.Module):  # it may have parameters that are the model's, too
            users[self._last_device] |= {*judged.parameters(), *judged.buffers()}
        used = devices_of(users)
        self._has_last = self._last_device == rank
        self._owned = [p for p in self._params if used.get(p, [0])[0] == rank]
        self._ties = TiedGradients(self._collective, self._params, used)
        self._home.own(set(self._owned), used)
        return stage

    def _in_parts(self, graph: LayerGraph, portion: Portion) -> tuple[Stage, list[set[Tensor]]]:
        """Cut by layers; returns also the tensors that each device uses. Collective."""
        count, rank, collective = self.replica.count, self.replica.index, self._collective
        check_layers(graph, self._pipeline, count)
        self._microbatches, firsts = self._agreed(graph, portion)
        parts = cut(graph, firsts)
        self._last_device = (len(parts) - 1) % count
        users: list[set[Tensor]] = [set() for _ in range(count)]
        for part in parts:
            users[part.index % count] |= tensors_of(graph, part)
        channels = StageChannels(parts, count, collective)
        return Stage(graph, parts, rank, channels, self.autocast, self.device), users

    def _agreed(self, graph: LayerGraph, portion: Portion) -> list[Any]:
        """How many microbatches, and the first layers of the parts. Collective."""
        mine = None
        if self.replica.leads:
            plan = self._plan(graph, portion)
            mine = [plan.microbatches, list(plan.firsts)]
        found: list[Any] = broadcast_tree(self._collective, mine)
        return found

    def _pieces(self, portion: Portion) -> MicroBatches:
        return MicroBatches(portion, self._microbatches, self.recipe)

    def _in_columns(
        self, graph: LayerGraph, portion: Portion
    ) -> tuple[ColumnStage, list[set[Tensor]]]:
        """Cut recurrent layers, and their sequence in chunks of time. Collective."""
        count, rank = self.replica.count, self.replica.index
        plan, chunks = plan_columns(graph, count), self._pipeline.columns
        assert chunks is not None
        if self.replica.leads:
            prove(graph, portion.total, self._rows_of(portion))
        self._last_device = count - 1
        channels = ColumnChannels(count, self._collective)
        users = [plan.tensors(device) for device in range(count)]
        choice = ChunkChoice(count, chunks or None, rows=self._pipeline.by_rows)
        return ColumnStage(plan, rank, choice, channels, self.autocast), users

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
        """The same rows on this device."""
        if not self._elsewhere:
            return portion
        x, y, weight = to_device((portion.x, portion.y, portion.weight), self.device)
        return Portion(x, y, weight, portion.examples, portion.total)

    def take(self, portion: Portion, last: bool) -> None:
        portion = self.here(portion)
        modes = [*(part.training for part in self.module.modules()), self.followed()]
        if self._stage is None or modes != self._modes:  # a forward is traced as it is now
            if self._stage is not None:  # another cut may give a device what it did not own
                self.bring_home()
                setup.align_state(self.optimizer, self.replica)
            self._stage, self._modes = self._begin(portion), modes
        self._home.leave_home()
        self._waiting += 1
        apply = last or self._waiting == self.recipe.accumulate
        batch = self._pieces(portion)
        inputs = [in_order(self._inputs, batch.x(m)) for m in range(batch.count)]
        seeds, dice = torch.randint(2**62, (batch.count,)).tolist(), torch.get_rng_state()
        ops = self._schedule(
            self.replica.index, self.replica.count, batch.count, self._pipeline.parts
        )
        self._stage.run(ops, inputs, seeds, batch.judge)
        torch.set_rng_state(dice)
        if self._has_last and self.recipe.metrics and batch.count:
            self.take_in(batch.output(), portion.y)
        if apply:
            self._waiting = 0
            self.before_commit()
            self._sum_gradients()
            named = dict(self.module.named_parameters())
            refuse_strays(named, set(self._owned), self.replica.name)
        self._finish(portion, batch, apply=apply)

    def _sum_gradients(self) -> None:
        """Have every owner of a parameter its whole gradient."""
        self._ties.send()

    def _finish(self, portion: Portion, batch: MicroBatches, *, apply: bool) -> None:
        """Tell the loss and the norm, update, and wait until everybody has."""
        norm = apply and self.recipe.clip_norm is not None
        square = self._square() if norm else 0.0
        told = gather_tree(self._collective, [batch.loss() if self._has_last else None, square])
        (loss,) = (loss for loss, _ in told if loss is not None)
        self.tally.add(loss, portion.total)
        if not apply:
            return
        if norm:
            self._clip(math.sqrt(sum(square for _, square in told)))
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
        """As torch.nn.utils.clip_grad_norm_, by the norm over all devices."""
        limit = self.recipe.clip_norm
        assert limit is not None
        if not norm <= limit:  # or it is no number, and then nothing is
            for param in self._owned:
                if param.grad is not None:
                    param.grad.mul_(limit / (norm + 1e-6))

    # --- coming apart -----------------------------------------------------------------------

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
    """What a batch gives the model, as its arguments."""
    if isinstance(x, dict):
        return [x[name] for name in names]
    several = isinstance(x, list | tuple) and not hasattr(x, "_fields")
    return list(x) if several else [x]


# --- A training step on rows of pipelines (training/mesh_grid.py) ---------------------------------


class RowShare(MicroBatches):
    """A row's share of a batch in microbatches, none if it has no rows; divided by what the whole
    batch is divided by."""

    def __init__(self, whole: Portion, mine: Portion, most: int, recipe: Recipe) -> None:
        super().__init__(mine, most, recipe)
        self._whole = whole
        if not mine.total:
            self.count = 0

    @cached_property
    def _divisor(self) -> float:
        return MicroBatches(self._whole, 1, self._recipe)._divisor

    def loss(self) -> float:
        """The part of the batch's loss that these rows make."""
        return super().loss() if self._numerators else 0.0


class MeshStaged(Staged):
    """One stage of one row."""

    def __init__(self, training: Training, replica: Replica) -> None:
        assert training.settings.pipeline is not None
        self._grid = MeshGrid(replica, training.settings.pipeline.data)
        super().__init__(training, self._grid.place)

    def _begin(self, portion: Portion) -> Stage | ColumnStage:
        return super()._begin(self._batch)  # a row may have no rows to trace with

    def _agreed(self, graph: LayerGraph, portion: Portion) -> list[Any]:
        """What the first row plans for its own share. Collective over all rows."""
        mine = None
        if self._grid.everybody.rank == 0:
            plan = self._plan(graph, _share_of(portion, self._grid))
            mine = [plan.microbatches, list(plan.firsts)]
        found: list[Any] = broadcast_tree(self._grid.everybody, mine)
        return found

    def take(self, portion: Portion, last: bool) -> None:
        self._batch = self.here(portion)
        super().take(_share_of(self._batch, self._grid), last)

    def _pieces(self, portion: Portion) -> MicroBatches:
        return RowShare(self._batch, portion, self._microbatches, self.recipe)

    def _sum_gradients(self) -> None:
        """Add up within the row, then over the rows."""
        super()._sum_gradients()
        self._grid.add_up(self._owned)

    def _finish(self, portion: Portion, batch: MicroBatches, *, apply: bool) -> None:
        """Tell the loss and the norm, update, and wait until everybody has."""
        norm = apply and self.recipe.clip_norm is not None
        square = self._square() if norm else 0.0
        mine = [batch.loss() if self._has_last else None, square]
        told = gather_tree(self._grid.everybody, mine)
        self.tally.add(sum(loss for loss, _ in told if loss is not None), self._batch.total)
        if not apply:
            return
        if norm:
            own = self._grid.own(told)  # every row has the whole gradient
            self._clip(math.sqrt(sum(square for _, square in own)))
        self._step()


def _share_of(portion: Portion, grid: MeshGrid) -> Portion:
    """The rows that a row of the mesh takes."""
    lo, hi = grid.share(portion.total)
    parts: list[Any] = [portion.x, portion.y, portion.weight]
    x, y, weight = rows(parts, lo, hi)
    found: Tensor | None = weight
    return Portion(x, y, found, hi - lo, hi - lo)
