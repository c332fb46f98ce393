"""A training step on rows of pipelines (training/mesh_grid.py)."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from torch import Tensor

from stratagem.data.shares import rows
from stratagem.frontends.adapter import Training
from stratagem.frontends.microbatches import MicroBatches
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sources import Portion
from stratagem.frontends.staged import Staged
from stratagem.training.columns import ColumnStage
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.mesh_grid import MeshGrid
from stratagem.training.replica import Replica
from stratagem.training.stage import Stage
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
