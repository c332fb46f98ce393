"""Keras' Adam on fixed lists of tensors: the update of a captured step, without the optimizer's
Python.

The numbers are those of `Optimizer.apply` with the fused step, bit for bit. What `apply` asks each
time (is a gradient clipped, a weight decayed or constrained, are averages kept?) is asked once: a
plan is made anew whenever somebody may have changed something. The learning rate is read each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.state.keras_stepper import STEP, epsilon_of, fused_step_of, is_plain

#: settings that give `apply` something to do beside the step
_BESIDE = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "weight_decay",
    "use_ema",
    "gradient_accumulation_steps",
    "loss_scale_factor",
)


class PlannedUpdate:
    """One optimizer's step on these variables."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        places = [optimizer._get_variable_index(v) for v in variables]
        self._optimizer = optimizer
        self._tensors = [v.value for v in variables]
        self.first = [optimizer._momentums[i].value for i in places]
        self.second = [optimizer._velocities[i].value for i in places]
        self._count, self._rate = optimizer.iterations.value, optimizer._learning_rate.value
        self._time = torch.zeros((), device=self._tensors[0].device)
        self._times = [self._time] * len(places)

    @classmethod
    def of(cls, optimizer: Any, variables: Sequence[Any]) -> PlannedUpdate | None:
        """None where `apply` does more, or where its fused step would not be taken."""
        own = vars(optimizer)
        other = [name for name in own if callable(getattr(type(optimizer), name, None))]
        if other != [STEP] or not optimizer.built or not variables:
            return None
        if any(getattr(optimizer, name, None) not in (None, False) for name in _BESIDE):
            return None
        known = optimizer._trainable_variables_indices
        if any(id(v) not in known for v in variables):
            return None  # `apply` says so
        if not isinstance(optimizer._learning_rate, keras.Variable):
            return None
        if any(v.constraint is not None or v.overwrite_with_gradient for v in variables):
            return None
        return cls(optimizer, variables) if is_plain([v.value for v in variables]) else None

    def apply(self, gradients: list[Tensor | None]) -> bool:
        """Make the step; False, with nothing done, where that is for the optimizer to do."""
        if "apply" in vars(self._optimizer) or not is_plain(gradients):
            return False
        time = int(self._count) + 1
        self._time.fill_(time)
        lists: Any = (self._tensors, gradients, self.first, self.second, [], self._times)
        fused_step_of(self._optimizer, lists, float(self._rate), time)
        self._count.add_(1)
        return True

    # --- several steps in one program ---------------------------------------------------------

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether it updates these, and nobody else makes the update."""
        alike = all(a is b for a, b in zip(self._tensors, weights, strict=True))
        return alike and "apply" not in vars(self._optimizer)

    @property
    def states(self) -> list[Tensor]:
        """What the optimizer writes beside the weights."""
        return [*self.first, *self.second, self._count]

    def settings(self, steps: int, after: int = 0) -> Any:
        """Of so many steps from now, or after some: step numbers, rate, betas, epsilons."""
        adam, time = self._optimizer, int(self._count) + 1 + after
        numbers = range(time, time + steps)
        times = torch.arange(time, time + steps).to(self._time)
        epsilons = [epsilon_of(adam, number) for number in numbers]
        return list(times.unbind()), float(self._rate), adam.beta_1, adam.beta_2, epsilons

    def count(self, steps: int) -> None:
        """So many steps were made."""
        self._count.add_(steps)
