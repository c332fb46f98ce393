"""Predict a step of processes that divide the layers of a model."""

from __future__ import annotations

import math
from dataclasses import replace

from stratagem.errors import UsageError
from stratagem.plan.predicted_step import PredictedStep, Prediction
from stratagem.plan.profile import DividedLayers


class DividedStep(PredictedStep):
    """A step of n processes with n times the rows; each has 1/n of the divided layers."""

    def divided(self) -> Prediction:
        """Predict a step of as many examples as mirrored replicas on as many devices take."""
        found, n = self.profile.divided, self.cfg.replicas
        if found is None:
            raise UsageError("which layers can be divided was not measured; plan another strategy.")
        passes, update = self._passes(found), self._update(found)
        measured = replace(self.cfg, hosts=1, per_host=2)
        two = DividedStep(self.profile, self.hw, measured, self.cal)
        if found.played:
            longer = found.played / sum(two._passes(found).values())
            passes = {name: seconds * longer for name, seconds in passes.items()}
        if found.update and update:
            update *= found.update / two._update(found)
        parts = {**passes, "optimizer": update, "overhead": self.cal.step}
        held = self.profile.footprint
        memory = None
        if held is not None:
            kept = n * held.activations * self._own(found.activations)
            memory = held.fixed * self._own(found.fixed) + kept
        return replace(self.prediction(parts), memory=memory)

    def _passes(self, found: DividedLayers) -> dict[str, float]:
        """Seconds of a forward and backward, from one replica's step."""
        n = self.cfg.replicas
        crossing = n * found.crossing  # each process writes its part, and reads all parts
        meetings = found.meetings * self.cal.crossing
        return {
            "compute": self.compute * found.seconds,
            "layers that all compute": self.compute
            * (1 - found.seconds)
            * n ** math.log2(found.growth),
            "handing over": crossing * (2 + n) / self.hw.local + meetings,
        }

    def _update(self, found: DividedLayers) -> float:
        return self.update * self._own(found.fixed)

    def _own(self, share: float) -> float:
        """A process' part of a quantity of which `share` is divided."""
        return share / self.cfg.replicas + 1 - share
