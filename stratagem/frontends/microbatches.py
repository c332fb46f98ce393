"""Microbatches of a batch, and their losses and outputs on the last device of a pipeline."""

from __future__ import annotations

import math
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shares import rows, share, with_tensors
from stratagem.frontends.adapter import with_row
from stratagem.frontends.losses import CountedLoss
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.row_check import joined
from stratagem.frontends.sources import Portion


class MicroBatches:
    """A pipeline's rows of a batch, in microbatches of nearly equal size."""

    def __init__(self, whole: Portion, own: Portion, most: int, recipe: Recipe) -> None:
        """`own`: this pipeline's rows of the batch; a row of a mesh may have none."""
        self._whole, self._portion, self._recipe = whole, own, recipe
        self.count = max(min(most, own.total), int(own.total == whole.total))
        self._cuts = [share(own.total, self.count, m) for m in range(self.count)]
        self._numerators: list[Tensor] = []
        self._outputs: list[Any] = []

    def x(self, m: int) -> Any:
        return self._microbatch(m)[0]

    def _microbatch(self, m: int) -> list[Any]:
        """Return inputs, targets and sample weights of a microbatch."""
        whole = [self._portion.x, self._portion.y, self._portion.weight]
        if self.count == 1:
            return whole
        cut: list[Any] = rows(whole, *self._cuts[m])
        return cut

    @cached_property
    def _divisor(self) -> float:
        """Return the denominator of the whole batch's loss on one device."""
        loss, whole = self._recipe.loss, self._whole
        if isinstance(loss, CountedLoss) and whole.weight is None:
            return loss.count(whole.y)
        return float(whole.total)

    def judge(self, m: int, output: Any) -> Tensor:
        """Return a microbatch's part of the batch's loss."""
        recipe, (start, end) = self._recipe, self._cuts[m]
        _, y, weight = self._microbatch(m)
        output = output if end - start > 1 else with_row(output, y)
        numerator, denominator = recipe.loss.terms(output, y, weight, end - start)
        self._numerators.append(numerator.detach())
        self._summed = denominator is None
        if recipe.metrics:
            self._outputs.append(with_tensors(output, Tensor.detach))
        scale = 1.0 if denominator is None else self._divisor or 1.0
        return numerator / (scale * recipe.accumulate)

    def loss(self) -> float:
        """Return these rows' part of the batch's loss; NaN if no row counts, as on one device."""
        if not self._numerators:
            return 0.0
        total = float(torch.stack(self._numerators).double().sum())
        if self._summed:
            return total
        return total / self._divisor if self._divisor else math.nan

    def output(self) -> Any:
        if all(isinstance(each, Tensor) for each in self._outputs):
            return torch.cat(self._outputs)
        return reduce(joined, self._outputs)
