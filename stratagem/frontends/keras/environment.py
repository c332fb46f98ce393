"""What of Keras' global state the replicas must have alike, and what each has for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.strategies.replica import Replica
from stratagem.wire.tree import gather_tree

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


@torch.no_grad()
def mean_of_kept(model: Any, replica: Replica) -> None:
    """One defined answer for moving statistics: the mean over replicas. Collective."""
    floats = [tensor for tensor in kept(model) if tensor.is_floating_point()]
    if floats:
        everybody = gather_tree(replica.collective, [t.detach() for t in floats])
        for i, tensor in enumerate(floats):
            tensor.copy_(sum(part[i].double() for part in everybody) / replica.count)


@contextmanager
def unheard(model: Any) -> Iterator[None]:
    """A borrowed row keeps a replica in step; it must leave no trace."""
    before = {id(v): v.value.detach().clone() for v in _unsteady(model)}
    yield
    with torch.no_grad():
        for variable in _unsteady(model):
            if id(variable) in before:
                variable.value.copy_(before[id(variable)])
            else:
                variable.value.zero_()


def _unsteady(model: Any) -> list[Any]:
    return [*model.metrics_variables, *model.non_trainable_weights]


def own_dice(model: Any, seed: int, index: int) -> None:
    """Other random numbers than on the other replicas, following from the chief's."""
    keras.utils.set_random_seed((seed + 7919 * index) % 2**31)
    known = {id(v) for v in (*model.weights, *model.metrics_variables)}
    for variable in model.non_trainable_variables:
        if id(variable) not in known and "seed" in variable.path:
            with torch.no_grad():
                variable.value[0] = (variable.value[0] + 104729 * index) % 2**31
