"""Rows of pipelines: each takes a share of every batch, and gradients are added up over the rows.

             stage 0    stage 1
    row 0  [ replica 0, replica 1 ]   a pipeline with one set of parameters
    row 1  [ replica 2, replica 3 ]   another
              column     column       add gradients up when their backward is done

A column waits for its own stages only, so the last stage's gradients are added up while the first
ones are still in their backward. All rows make the same update of the same sum.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.shares import rows, share
from stratagem.frontends.adapter import Training
from stratagem.frontends.microbatches import MicroBatches
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sources import Portion
from stratagem.frontends.staged import Staged
from stratagem.training.columns import ColumnStage
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.replica import Replica
from stratagem.training.stage import Stage
from stratagem.wire.shared_memory import sharing
from stratagem.wire.shared_scratch import SharedScratch
from stratagem.wire.subgroup import subgroup
from stratagem.wire.tree import broadcast_tree, gather_tree


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
        self._everybody, count = replica.collective, training.settings.pipeline.data
        stages = replica.count // count
        self._row, stage = divmod(replica.index, stages)
        self._row_count = count
        grid = [[row * stages + s for s in range(stages)] for row in range(count)]
        row = subgroup(self._everybody, grid)
        column = subgroup(self._everybody, list(zip(*grid, strict=True)))
        self._column = column
        self._scratch = SharedScratch(sharing(column)) if column.shares_memory else None
        own = Replica(stage, stages, replica.device, replica.name, row, replica.membership)
        super().__init__(training, own)

    def _begin(self, portion: Portion) -> Stage | ColumnStage:
        return super()._begin(self._batch)  # a row may have no rows to trace with

    def _agreed(self, graph: LayerGraph, portion: Portion) -> list[Any]:
        """What the first row plans for its own share. Collective over all rows."""
        mine = None
        if self._everybody.rank == 0:
            plan = self._plan(graph, _share_of(portion, self._row_count, 0))
            mine = [plan.microbatches, list(plan.firsts)]
        found: list[Any] = broadcast_tree(self._everybody, mine)
        return found

    def take(self, portion: Portion, last: bool) -> None:
        self._batch = self.here(portion)
        super().take(_share_of(self._batch, self._row_count, self._row), last)

    def _pieces(self, portion: Portion) -> MicroBatches:
        return RowShare(self._batch, portion, self._microbatches, self.recipe)

    def _sum_gradients(self) -> None:
        """Add up within the row, then over the rows."""
        super()._sum_gradients()
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in self._owned:
            if param.requires_grad:
                by_type.setdefault(param.dtype, []).append(param)
        for params in by_type.values():
            self._add_up(params)

    def _add_up(self, params: list[nn.Parameter]) -> None:
        """Gradients of one type; one that no row has stays away, as on one device."""
        grads = [p.grad for p in params]
        has = [float(grad is not None) for grad in grads]
        flat = [
            torch.zeros_like(p) if grad is None else grad
            for p, grad in zip(params, grads, strict=True)
        ]
        sizes = [p.numel() for p in params]
        told = torch.cat([*(grad.reshape(-1) for grad in flat), flat[0].new_tensor(has)])
        if self._scratch is not None:
            told = self._scratch.sum(told)
        else:
            self._column.all_reduce(told).wait()
        *sums, there = torch.split(told, [*sizes, len(params)])
        for param, total, count in zip(params, sums, there.tolist(), strict=True):
            param.grad = total.view(param.shape) if count else None

    def _finish(self, portion: Portion, batch: MicroBatches, *, apply: bool) -> None:
        """Tell the loss and the norm, update, and wait until everybody has."""
        norm = apply and self.recipe.clip_norm is not None
        square = self._square() if norm else 0.0
        mine = [batch.loss() if self._has_last else None, square]
        told = gather_tree(self._everybody, mine)
        self.tally.add(sum(loss for loss, _ in told if loss is not None), self._batch.total)
        if not apply:
            return
        if norm:
            first = self._row * self.replica.count  # every row has the whole gradient
            own = told[first : first + self.replica.count]
            self._clip(math.sqrt(sum(square for _, square in own)))
        self._step()


def _share_of(portion: Portion, count: int, row: int) -> Portion:
    """The rows that a row of the mesh takes."""
    lo, hi = share(portion.total, count, row)
    parts: list[Any] = [portion.x, portion.y, portion.weight]
    x, y, weight = rows(parts, lo, hi)
    found: Tensor | None = weight
    return Portion(x, y, found, hi - lo, hi - lo)
