"""An epoch as the coordinator keeps it: what was dealt, reported and applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class AppliedLoss:
    """The loss over all examples whose gradients were applied."""

    total: float = 0.0
    examples: int = 0
    waiting: list[tuple[float, float, int]] = field(default_factory=list)

    def fold(self) -> None:
        """Add the loss of an applied batch, weighted by examples."""
        weight, count, total = 0.0, 0, 0.0
        for loss, w, n in self.waiting:
            weight, count = weight + w, count + n
            total += loss * w if w else 0.0  # where nothing weighs, its loss may be no number
        if weight and count:
            self.total += total / weight * count
            self.examples += count
        self.waiting = []


@dataclass
class Epoch:
    """One pass of the chief over its batches."""

    number: int = 0
    #: whether all its batches have been put up
    dealt: bool = False
    #: by a ticket's serial: the examples to go with it, where the chief hands them out
    payloads: dict[int, Tensor] = field(default_factory=dict)
    #: by worker: what it has counted
    reports: dict[int, Tensor] = field(default_factory=dict)
    #: workers whose last part was dropped again
    void: set[int] = field(default_factory=set)
    tally: AppliedLoss = field(default_factory=AppliedLoss)
