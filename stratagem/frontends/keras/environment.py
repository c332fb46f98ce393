"""What of Keras' global state the replicas must have alike, and what each has for itself."""

from __future__ import annotations

from typing import Any

import keras

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
