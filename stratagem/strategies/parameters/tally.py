"""The loss of an epoch, as gradients that count make it up."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """The loss over all examples whose gradients were applied."""

    total: float = 0.0
    examples: int = 0
    waiting: list[tuple[float, float, int]] = field(default_factory=list)

    def fold(self) -> None:
        """An update was made of all that waits: the loss of its batch, weighted by examples."""
        weight = sum(w for _, w, _ in self.waiting)
        count = sum(n for _, _, n in self.waiting)
        if weight and count:
            self.total += sum(loss * w for loss, w, _ in self.waiting if w) / weight * count
            self.examples += count
        self.waiting = []
