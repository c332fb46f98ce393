"""The loss of an epoch, added up as it comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossSum:
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

    def total(self) -> list[Any]:
        """The sum of losses, each times its examples; and of the examples."""
        self._fold()
        return [self._sum, self.examples]

    def state(self) -> dict[str, Any]:
        """What was added up, for `load_state` of another."""
        losses = torch.stack(self._losses).cpu() if self._losses else None
        found = {"examples": self.examples, "sum": self._sum, "losses": losses}
        return found | {"totals": list(self._totals)}

    def load_state(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Go on from there; losses that were not folded yet are not now, so that no bit differs."""
        self.examples, self._sum = int(state["examples"]), float(state["sum"])
        self._losses = []
        if state["losses"] is not None:
            self._losses = list(state["losses"].to(device).unbind())
        self._totals = list(state["totals"])
