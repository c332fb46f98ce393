"""Warm-up of asynchronous training: workers come in one after the other.

One worker first and then all of them at once makes early training worse than no warm-up at all;
letting them in gradually helps. So the number at work grows in a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.rules.record import Record, whole


@dataclass(frozen=True)
class Ramp(Record):
    """From one worker to all of them over `steps` updates.

    Asynchronous(warmup=Ramp(steps=500))
    """

    steps: int

    def __post_init__(self) -> None:
        whole("steps of Ramp", self.steps, 0)

    def allowed(self, version: int, workers: int) -> int:
        """How many of `workers` may work after `version` updates."""
        if version >= self.steps or workers <= 1:
            return workers
        return 1 + (workers - 1) * version // self.steps
