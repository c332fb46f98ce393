"""The loss of an epoch, added up as it comes."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """The loss over all examples so far; losses stay on the device until somebody asks."""

    _KEEP = 256

    def __init__(self) -> None:
        self.examples = 0
        self._sum = 0.0
        self._losses: list[Tensor] = []
        self._totals: list[int] = []

    def add(self, loss: Tensor | float, total: int) -> None:
        self.examples += total
        if not isinstance(loss, Tensor):
            self._sum += loss * total
            return
        self._losses.append(loss.detach())
        self._totals.append(total)
        if len(self._losses) == self._KEEP:
            self._fold()

    def _fold(self) -> None:
        if self._losses:
            losses = torch.stack(self._losses).double().cpu()
            self._sum += float(losses @ torch.tensor(self._totals, dtype=torch.float64))
            self._losses.clear()
            self._totals.clear()

    def mean(self) -> float:
        self._fold()
        return self._sum / self.examples if self.examples else float("nan")
