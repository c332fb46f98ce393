"""How a model is trained: what `compile` was told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stratagem.frontends.losses import Loss
from stratagem.frontends.metrics import MetricSet


@dataclass
class Recipe:
    """The parts of it."""

    loss: Loss
    metrics: MetricSet
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    jit_compile: bool = False
