"""Running statistics of a model: after each epoch, their mean over the workers that worked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stratagem.servers.client import Client


class RunningStatistics:
    """The buffers that every worker keeps for itself while an epoch lasts."""

    def __init__(
        self, worker: Client, module: nn.Module, beside: list[Tensor], workers: int
    ) -> None:
        """`beside`: all tensors that are not trained, frozen parameters included."""
        self._worker, self._module = worker, module
        self._beside, self._workers = beside, workers

    def here(self) -> list[Tensor]:
        """This worker's statistics."""
        return [b.detach() for b in self._module.buffers() if b.is_floating_point()]

    def average(self, reports: Sequence[Sequence[Tensor]]) -> None:
        """As the chief: take the mean of the workers' reports."""
        mine = self.here()
        if not mine or not reports:
            return
        means = [
            torch.stack([t.double().cpu() for t in each]).mean(0)
            for each in zip(*reports, strict=True)
        ]
        copy_into(mine, means)

    def send(self, *, everything: bool = False) -> None:
        """As the chief: send the statistics, or `everything` that is not trained, to all."""
        if self._beside and self._workers > 1:
            mine = self._beside if everything else self.here()
            values = [t.detach().cpu() for t in mine]
            self._worker.ask("set means", values, epoch=self._worker.epoch)

    def receive(self, epoch: int) -> None:
        """As another worker: take the chief's."""
        told = self._worker.ask("means", epoch=epoch)[1] if self._beside else None
        if told is not None:
            copy_into(self._beside if len(told) == len(self._beside) else self.here(), told)


def copy_into(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(tensors, values, strict=True):
            mine.copy_(theirs)
