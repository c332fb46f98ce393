"""A batch of a Keras model in microbatches, and what comes of them on the last device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shares import rows, share
from stratagem.errors import NotDistributable
from stratagem.frontends.keras.denominators import BatchPart, made_exact
from stratagem.frontends.keras.model_graph import model_inputs, model_output
from stratagem.frontends.microbatches import map_detached
from stratagem.training.mesh_grid import MeshGrid


class MicrobatchPart(BatchPart):
    """One microbatch, whose loss counts with its share of the rows."""

    #: with which it would be the whole batch
    remedy = "microbatches=1"

    def divided(self, by: float | None) -> float | None:
        if by is None or self.whole:
            return 1.0
        raise NotDistributable(
            "the loss is divided by a mask or by the sum of the sample weights, which the last "
            "stage knows when all microbatches are there, and backward has begun before; use "
            f"{self.remedy}, or a MirroredStrategy."
        )

    def gathered(self, own: Tensor) -> list[Tensor]:
        if self.whole:
            return [own]
        raise NotDistributable(
            "this batch has a mask and sample weights, which Keras multiplies with a factor of the "
            f"whole batch, and a stage has a microbatch; use {self.remedy}, or a MirroredStrategy."
        )


class StageBatch:
    """The rows of a batch that a pipeline takes, in pieces of nearly one size; all of them, or what
    the row of a mesh has, which may be none."""

    def __init__(
        self, model: Any, grid: MeshGrid, data: Any, total: int, most: int | None = None
    ) -> None:
        """`most`: of microbatches; None: the whole batch is one."""
        self._model, self._data, self._part = model, data, MicrobatchPart(grid.place)
        self._mine = (0, total) if most is None else grid.share(total)
        first, last = self._mine
        self.count = min(most or 1, last - first)
        pieces = (share(last - first, self.count, m) for m in range(self.count))
        self._cuts = [(first + start, first + end) for start, end in pieces]
        self._total = total
        self._losses: list[Tensor] = []
        self._outputs: list[Any] = []
        if grid.count > 1:
            self._part.remedy = "one PipelineStrategy with microbatches=1"

    def inputs(self) -> list[list[Tensor]]:
        """Of every microbatch, in the order of the model's inputs."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(self._data)
        whole = model_inputs(self._model, x)
        return [[each[start:end] for each in whole] for start, end in self._cuts]

    def judge(self, m: int, found: Sequence[Any]) -> Tensor:
        """The part of the batch's loss that a microbatch makes, but for regularisers."""
        start, end = self._cuts[m]
        piece = self._data if end - start == self._total else rows(self._data, start, end)
        _, y, weight = keras.utils.unpack_x_y_sample_weight(piece)
        self._part.begin(end - start, self._total)
        with made_exact(self._part):
            loss = self._model._compile_loss(y, model_output(self._model, found), weight)
        part: Tensor = loss * ((end - start) / self._total)
        self._losses.append(part.detach())
        self._outputs.append(map_detached(list(found)))
        return part

    def loss(self) -> float:
        return float(sum(loss.double() for loss in self._losses))

    def count_metrics(self) -> None:
        """As one device does, of the whole batch; rows of a mesh add their counts up."""
        if not self._outputs:
            return
        first, last = self._mine
        mine = self._data if last - first == self._total else rows(self._data, first, last)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(mine)
        flat = [_joined(each) for each in zip(*self._outputs, strict=True)]
        output = model_output(self._model, flat)
        self._part.begin(last - first, self._total)
        with made_exact(self._part):
            self._model.compute_metrics(x, y, output, sample_weight=weight)


def _joined(pairs: Sequence[Any]) -> list[Any]:
    """One output of all microbatches, with its mask."""
    masks = [mask for _, mask in pairs]
    mask = None if any(each is None for each in masks) else torch.cat(masks)
    return [torch.cat([value for value, _ in pairs]), mask]
