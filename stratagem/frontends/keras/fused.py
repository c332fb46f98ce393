"""The model's optimizers get the fused step where there is one."""

from __future__ import annotations

from typing import Any

from stratagem.frontends.keras.parcel import optimizers
from stratagem.state.keras_adam import STEP as STEP
from stratagem.state.keras_adam import fuse


def install(model: Any) -> None:
    """Give the model's optimizers the fused step where there is one."""
    for optimizer in optimizers(model):
        fuse(optimizer)
