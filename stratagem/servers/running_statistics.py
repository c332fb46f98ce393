"""State that workers keep for themselves during an epoch: running statistics, push residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.servers.client import Client
from stratagem.servers.training_plan import TrainingPlan
from stratagem.training.lossy_wire import warn_of_dropped


class PushResiduals:
    """The residuals of a worker's compressed pushes, which checkpoints contain."""

    def __init__(self, worker: Client, plan: TrainingPlan) -> None:
        self._worker, self.record = worker, plan.compression
        #: as the chief: residuals from a checkpoint that still have to be sent to the workers
        self.untold: list[Mapping[str, Any]] = []

    def here(self) -> dict[str, Any]:
        """Return this worker's residuals, to be pushed later."""
        kept = self._worker.memory.outbox.state()
        return kept and {"worker": self._worker.index, **kept}

    def go_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """As the chief: have all workers go on with the residuals of a checkpoint."""
        states = sorted((s for s in states if s), key=lambda state: int(state.get("worker", 0)))
        if not states:
            return
        made = states[0]["wire"]
        if "pushes" not in states[0] or made != repr(self.record):
            warn_of_dropped(f"wire={made}")
            return
        self.untold = list(states)
        self.load(states)

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        if states:
            self._worker.memory.outbox.load(states, self._worker.index)


class RunningStatistics:
    """The buffers that every worker keeps for itself during an epoch."""

    def __init__(
        self,
        worker: Client,
        module: nn.Module,
        beside: list[Tensor],
        workers: int,
        residuals: PushResiduals,
    ) -> None:
        """`beside`: all tensors that are not trained, frozen parameters included."""
        self._worker, self._module = worker, module
        self._beside, self._workers = beside, workers
        self._residuals, self._asked = residuals, False

    def here(self) -> list[Tensor]:
        """Return this worker's statistics."""
        return [b.detach() for b in self._module.buffers() if b.is_floating_point()]

    def average(self, reports: Sequence[Sequence[Tensor]]) -> None:
        """As the chief: average the workers' reports."""
        mine = self.here()
        if not mine or not reports:
            return
        means = [
            torch.stack([t.double().cpu() for t in each]).mean(0)
            for each in zip(*reports, strict=True)
        ]
        copy_into(mine, means)

    def send(self, *, everything: bool = False) -> None:
        """As the chief: send the statistics, or `everything` not trained, to all workers."""
        if self._workers > 1 and (self._beside or self._residuals.untold):
            mine = self._beside if everything else self.here()
            told = [[t.detach().cpu() for t in mine], self._residuals.untold]
            self._worker.ask("set means", told, epoch=self._worker.epoch)
        self._residuals.untold = []

    def receive(self, epoch: int) -> None:
        """As another worker: take the chief's statistics."""
        first, self._asked = not self._asked, True
        asks = self._beside or (first and self._residuals.record is not None)
        told = self._worker.ask("means", epoch=epoch)[1] if asks else None
        if told is not None:
            tensors, residuals = told
            copy_into(self._beside if len(tensors) == len(self._beside) else self.here(), tensors)
            self._residuals.load(residuals)


def copy_into(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(tensors, values, strict=True):
            mine.copy_(theirs)
