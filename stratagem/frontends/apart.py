"""The step of replicas that train by themselves and meet now and then (`sync=`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem.frontends.sources import Portion
from stratagem.frontends.steps import Replicated, per_target, ratio
from stratagem.training.local_steps import LocalUpdates
from stratagem.wire.tree import gather_tree


class Apart(Replicated):
    """A copy of the parameters each, updated by its own gradients between two meetings.

    What the losses of all replicas were is told at meetings, too.
    """

    committer: LocalUpdates

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        #: numerators and denominators that the others do not know yet, and their global batches
        self._untold: list[Tensor] = []
        self._totals: list[int] = []
        self._met = 0

    def _divisor(self, portion: Portion, denominator: Any) -> float:
        apart = not self.committer.cadence.together
        if apart and self.recipe.loss.counted and self.recipe.accumulate > 1:
            counted = float(denominator) or 1.0  # its own targets, for all rows; if none, as below
            return counted * portion.total / max(portion.examples, 1)
        return super()._divisor(portion, denominator)

    def _count_now(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        if self.committer.cadence.together:
            super()._count_now(portion, numerator, denominator)
        else:
            pair = [float(numerator), float(denominator)]
            self._keep_count(torch.tensor(pair, dtype=torch.float64), portion.total)

    def _keep_count(self, pair: Tensor, total: int) -> None:
        self._untold.append(pair)
        self._totals.append(total)

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        together = self.committer.cadence.together
        notes: Any = self.committer.commit([numerator, denominator]).notes
        if self.recipe.accumulate == 1:
            if self.recipe.loss.counted:
                self.committer.buckets.scale(per_target(portion, notes))
            if together:
                self.tally.add(notes[0] / notes[1], portion.total)
            else:
                own = notes.detach() * (portion.examples / portion.total)
                self._keep_count(own, portion.total)
        self.update()
        if self.committer.meetings > self._met:
            self._tell()

    def meet(self) -> None:
        self.committer.meet()
        self._tell()

    def _tell(self) -> None:
        """Add up the losses that nobody else knew of. Collective."""
        self._met = self.committer.meetings
        if self._untold:
            everybody = gather_tree(self.replica.collective, torch.stack(self._untold).double())
            for (above, below), total in zip(
                torch.stack(everybody).sum(0).tolist(), self._totals, strict=True
            ):
                self.tally.add(ratio(above, below), total)
        self._untold, self._totals = [], []
