"""The step of replicas that train by themselves and meet now and then (`sync=`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.frontends.adapter import TorchAdapter, Training
from stratagem.frontends.epoch_sums import LossSum
from stratagem.frontends.fit_journal import FitJournal
from stratagem.frontends.sources import Portion
from stratagem.frontends.steps import Replicated, per_target, ratio
from stratagem.training.broken_round import BrokenRound
from stratagem.training.local_steps import LocalUpdates
from stratagem.training.replica import Replica
from stratagem.wire.tree import gather_tree


class Apart(Replicated):
    """The step of replicas that update their own copies by their own gradients between meetings.

    Losses, too, are added up over the replicas at meetings.
    """

    committer: LocalUpdates

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        #: numerators and denominators since the last meeting, and the rows of their global batches
        self._untold: list[Tensor] = []
        self._totals: list[int] = []
        #: where replicas may leave: reads this replica's metric counts, and adds the gathered ones
        self._counts: Callable[[], Any] = lambda: None
        self._hear: Callable[[Sequence[Any]], None] = lambda told: None

    def keep_journal(self, journal: FitJournal) -> None:
        """Gather metric counts at meetings, too, since replicas may leave."""
        gather, cadence = self.before_commit, self.committer.cadence
        self.before_commit = lambda: gather() if cadence.together else None
        self._counts = journal.counts
        self._hear = partial(journal.hear, self.recipe.metrics, self.replica)
        self.committer.untold = lambda: {**self._mine(), "totals": self._totals}

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

    def update(self) -> None:
        TorchAdapter.update(self)  # a meeting comes when the update is counted

    def sync(self) -> None:
        before = self.committer.meetings
        self.committer.sync()
        if self.committer.meetings > before:
            self._tell()

    def meet(self) -> None:
        self.committer.meet()
        self._tell()

    def _mine(self) -> dict[str, Any]:
        losses = torch.stack(self._untold).double() if self._untold else None
        return {"losses": losses, "counts": self._counts()}

    def _tell(self) -> None:
        """Add up the losses since the last meeting. Collective."""
        if self._untold:
            everybody = gather_tree(self.replica.collective, self._mine())
            _add_up(everybody, self._totals, self.tally, self._hear)
        self._untold, self._totals = [], []


def _add_up(
    everybody: Sequence[Any], totals: Sequence[int], tally: LossSum, hear: Callable[[Any], None]
) -> None:
    sums = torch.stack([each["losses"] for each in everybody]).sum(0).tolist()
    for (above, below), total in zip(sums, totals, strict=True):
        tally.add(ratio(above, below), total)
    hear([each["counts"] for each in everybody])


def tell_late(
    mine: BrokenRound | None, replica: Replica, tally: LossSum, hear: Callable[[Any], None]
) -> None:
    """Add up the losses of a broken round, of replicas as far as the first. Collective."""
    everybody = gather_tree(replica.collective, None if mine is None else mine.untold)
    if mine is not None:
        mine.untold = None
    first = everybody[0]
    if first is None or first["losses"] is None:
        return
    as_much = [each for each in everybody if each and each["totals"] == first["totals"]]
    _add_up(as_much, first["totals"], tally, hear)
