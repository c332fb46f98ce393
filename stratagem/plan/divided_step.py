"""Predict a step of processes that divide every layer: all rows on each, a part of most layers."""

from __future__ import annotations

from dataclasses import replace

from stratagem.errors import UsageError
from stratagem.plan.predicted_step import PredictedStep, Prediction


class DividedStep(PredictedStep):
    """n processes with n times the rows: of divided layers each has 1/n, of others all."""

    def divided(self) -> Prediction:
        """As many examples a step as mirrored replicas on as many devices would take."""
        found, n = self.profile.divided, self.cfg.replicas
        if found is None:
            raise UsageError("which layers can be divided was not measured; plan another strategy.")
        crossing = n * found.crossing  # each writes its own, and reads everybody's
        meeting = found.meeting or self.cal.crossing
        parts = {
            "compute": self.compute * found.seconds,
            "layers that all compute": self.compute * n * (1 - found.seconds),
            "handing over": crossing * (2 + n) / self.hw.local + found.meetings * meeting,
            "optimizer": self.profile.optimizer * self.crowding * self._own(found.fixed),
            "overhead": self.cal.step,
        }
        held = self.profile.footprint
        memory = None
        if held is not None:
            kept = n * held.activations * self._own(found.activations)
            memory = held.fixed * self._own(found.fixed) + kept
        return replace(self.prediction(parts), memory=memory)

    def _own(self, share: float) -> float:
        """What a process has of something of which this share is divided."""
        return share / self.cfg.replicas + 1 - share
