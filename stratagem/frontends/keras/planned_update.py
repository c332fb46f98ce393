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

from stratagem.state.keras_stepper import STEP, fused_step_of, is_plain

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
        self._first = [optimizer._momentums[i].value for i in places]
        self._second = [optimizer._velocities[i].value for i in places]
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
        lists: Any = (self._tensors, gradients, self._first, self._second, [], self._times)
        fused_step_of(self._optimizer, lists, float(self._rate), time)
        self._count.add_(1)
        return True
