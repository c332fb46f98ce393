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
        weight, count, total = 0.0, 0, 0.0
        for loss, w, n in self.waiting:
            weight, count = weight + w, count + n
            total += loss * w if w else 0.0  # where nothing weighs, its loss may be no number
        if weight and count:
            self.total += total / weight * count
            self.examples += count
        self.waiting = []
