"""What of Keras' global state the replicas must have alike, and what each has for itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.strategies.replica import Replica

_SETTINGS = ("floatx", "epsilon", "image_data_format", "dtype_policy")


def config() -> dict[str, Any]:
    """Keras' own settings, which layers read when they are made."""
    return {name: getattr(keras.config, name)() for name in _SETTINGS}


def configure(values: dict[str, Any]) -> None:
    """Take over another process' settings."""
    for name, value in values.items():
        getattr(keras.config, f"set_{name}")(value)


def device_name(replica: Replica) -> str:
    """What `keras.device` calls the replica's device."""
    device = replica.device
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def move(variables: Iterable[Any], device: torch.device) -> None:
    """Have the variables live on the device, wherever they were made."""
    for variable in variables:
        if variable.value.device != device:
            variable.value.data = variable.value.data.to(device)


def buffers(model: Any) -> list[Tensor]:
    """What torch modules inside the model keep beside their parameters."""
    layers = model._flatten_layers()
    return list({id(b): b for layer in layers for b in layer.buffers()}.values())


def kept(model: Any) -> list[Tensor]:
    """What layers keep in mind and nobody trains: moving statistics and the like."""
    return [*(v.value for v in model.non_trainable_weights), *buffers(model)]


def own_dice(model: Any, seed: int, index: int) -> None:
    """Other random numbers than on the other replicas, following from the chief's."""
    keras.utils.set_random_seed((seed + 7919 * index) % 2**31)
    known = {id(v) for v in (*model.weights, *model.metrics_variables)}
    for variable in model.non_trainable_variables:
        if id(variable) not in known and "seed" in variable.path:
            with torch.no_grad():
                variable.value[0] = (variable.value[0] + 104729 * index) % 2**31
