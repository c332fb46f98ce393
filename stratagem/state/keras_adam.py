"""Keras' Adam in one pass over memory instead of nine; the variables and the numbers stay Keras'.

Keras adds epsilon to the root of the uncorrected second moment, torch to the corrected one, so that
torch's fused kernel with epsilon / sqrt(1 - beta_2^t) makes the very step of Keras.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import torch

STEP = "_parallel_update_step"


def fuse(optimizer: Any) -> None:
    """Give the optimizer the fused step if there is one for it."""
    of_keras = type(optimizer).__module__.startswith("keras.")
    adam = isinstance(optimizer, keras.optimizers.Adam)  # AdamW too: decay comes before
    if of_keras and adam and not optimizer.amsgrad and hasattr(optimizer, STEP):
        optimizer.__dict__[STEP] = _step(optimizer)


def _step(optimizer: Any) -> Callable[..., None]:
    plain = getattr(type(optimizer), STEP).__get__(optimizer)

    def step(grads: list[Any], variables: list[Any], learning_rate: Any) -> None:
        tensors = [v.value for v in variables]
        first = tensors[0]
        if not all(
            t.dtype is torch.float32 and t.device == first.device and t.is_contiguous()
            and g.dtype is torch.float32 and g.is_contiguous() and g.layout is torch.strided
            for t, g in zip(tensors, grads, strict=True)
        ):  # fmt: skip
            plain(grads, variables, learning_rate)
            return
        places = [optimizer._get_variable_index(v) for v in variables]
        time = int(optimizer.iterations) + 1
        torch._fused_adam_(
            tensors, grads, [optimizer._momentums[i].value for i in places],
            [optimizer._velocities[i].value for i in places], [],
            [torch.tensor(float(time), device=first.device)] * len(places),
            lr=float(learning_rate), beta1=optimizer.beta_1, beta2=optimizer.beta_2,
            weight_decay=0.0, eps=optimizer.epsilon / math.sqrt(1 - optimizer.beta_2**time),
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return step
