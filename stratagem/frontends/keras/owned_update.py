"""An update of which every process makes a part: some variables, with the user's own optimizer.

Weights and the optimizer's slots lie in memory that all share; who owns a variable writes it. What
an optimizer keeps once (its count of steps, the learning rate) every process has for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.errors import NotDistributable


def slots(optimizer: Any) -> list[Tensor]:
    """What an optimizer keeps for each variable."""
    own = [v for v in vars(optimizer).values() if isinstance(v, keras.Variable)]
    once = {id(v) for v in own}
    return [v.value for v in optimizer.variables if id(v) not in once]


def square(gradients: Sequence[Tensor | None]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients if g is not None)


@torch.no_grad()
def update(
    optimizer: Any, gradients: Sequence[Tensor | None], variables: Sequence[Any], norm: float
) -> None:
    """Step these variables; `norm` is that of the gradients of all processes."""
    with _clipped(optimizer, norm) as clip:
        if any(gradient is not None for gradient in gradients):
            type(optimizer).apply(optimizer, [clip(g) for g in gradients], list(variables))
        else:
            optimizer.iterations.assign_add(1)


@contextmanager
def _clipped(optimizer: Any, norm: float) -> Iterator[Any]:
    """Clips gradients as Keras does, by the norm over all processes."""
    limit = optimizer.global_clipnorm
    if not limit:
        yield lambda grad: grad
        return
    scale = limit * min(1.0 / norm if norm else math.inf, 1.0 / limit) + (norm - norm)
    optimizer.global_clipnorm = None
    try:
        yield lambda grad: None if grad is None else grad * scale
    finally:
        optimizer.global_clipnorm = limit


def refuse_optimizer(optimizer: Any, who: str) -> None:
    """Refuse one that does more than step each variable by itself; `who` makes a part."""
    kind = type(optimizer).__name__
    if optimizer is None or not type(optimizer).__module__.startswith("keras."):
        raise NotDistributable(
            f"{who} steps the optimizer on its own variables, and {kind} is not one of Keras' own; "
            "use one of keras.optimizers."
        )
    if hasattr(optimizer, "inner_optimizer"):
        raise NotDistributable(
            f"{who} has no scaler of gradients, so {kind} (mixed_float16) cannot be used; "
            "mixed_bfloat16 needs none."
        )
    if optimizer.use_ema:
        raise NotDistributable(
            f"use_ema=True averages all variables at once, and {who} has its own; leave it out, or "
            "use a MirroredStrategy."
        )
    if optimizer.gradient_accumulation_steps:
        raise NotDistributable(
            f"gradient_accumulation_steps keeps gradients of all variables, and {who} has its own; "
            "use a batch_size that many times as large, or a MirroredStrategy."
        )
