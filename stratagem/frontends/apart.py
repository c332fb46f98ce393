"""The step of replicas that train locally and synchronize only now and then (`sync=`)."""

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
    """The step of replicas that make local updates between two meetings.

    Losses are summed over the replicas at meetings, too.
    """

    committer: LocalUpdates

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        #: loss numerators and denominators since the last meeting, and their global batch sizes
        self._untold: list[Tensor] = []
        self._batch_sizes: list[int] = []
        #: if replicas may leave: returns this replica's metric counts, and adds gathered counts
        self._counts: Callable[[], Any] = lambda: None
        self._add_counts: Callable[[Sequence[Any]], None] = lambda told: None

    def keep_journal(self, journal: FitJournal) -> None:
        """Gather metric counts at meetings, too, since replicas may leave."""
        gather, cadence = self.before_commit, self.committer.cadence
        self.before_commit = lambda: gather() if cadence.together else None
        self._counts = journal.counts
        self._add_counts = partial(journal.hear, self.recipe.metrics, self.replica)
        self.committer.untold = lambda: {**self._mine(), "totals": self._batch_sizes}

    def _divisor(self, portion: Portion, denominator: Any) -> float:
        apart = not self.committer.cadence.together
        if apart and self.recipe.loss.counted and self.recipe.accumulate > 1:
            # the targets of this share, scaled to all rows; 1 if none of them counts
            counted = float(denominator) or 1.0
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
        self._batch_sizes.append(total)

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
        TorchAdapter.update(self)  # the loop calls `sync` once it has counted the update

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
        """Sum the losses since the last meeting over the replicas. Collective."""
        if self._untold:
            everybody = gather_tree(self.replica.collective, self._mine())
            _add_up(everybody, self._batch_sizes, self.tally, self._add_counts)
        self._untold, self._batch_sizes = [], []


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
    """Sum the losses of a broken round, of replicas that are as far as rank 0. Collective."""
    everybody = gather_tree(replica.collective, None if mine is None else mine.untold)
    if mine is not None:
        mine.untold = None
    first = everybody[0]
    if first is None or first["losses"] is None:
        return
    as_much = [each for each in everybody if each and each["totals"] == first["totals"]]
    _add_up(as_much, first["totals"], tally, hear)
