"""Keras' BatchNormalization over the global batch: the torch layers' way, another layer's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from stratagem.errors import NotDistributable
from stratagem.strategies.replica import Replica
from stratagem.strategies.sync_batchnorm import GlobalNorm, Room


def install(model: Any, replica: Replica, active: Callable[[], bool]) -> Callable[[], None]:
    """Synchronise every BatchNormalization layer; returns what takes it back. Collective.

    Layers meet only while `active`: outside a step they are called on one replica alone.
    """
    layers = [
        layer for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]  # fmt: skip
    side = replica.beside()
    for layer in layers:
        if getattr(layer, "renorm", False):
            raise NotDistributable(
                f"layer {layer.name!r} uses renorm=True, which cannot be synchronised; leave it "
                "out, or set sync_batchnorm=False."
            )
        mean = layer.moving_mean.value
        room = Room(side, mean.numel(), mean.dtype, replica.device)
        layer.__dict__["call"] = _call(layer, room, replica, active)

    def remove() -> None:
        for layer in layers:
            layer.__dict__.pop("call", None)

    return remove


def _call(
    layer: Any, room: Room, replica: Replica, active: Callable[[], bool]
) -> Callable[..., Any]:
    plain = type(layer).call

    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not (active() and training and layer.trainable):
            return plain(layer, inputs, training=training, mask=mask)
        if mask is not None:
            raise NotDistributable(
                f"layer {layer.name!r} has a masked input, whose statistics cannot be "
                "synchronised; set sync_batchnorm=False, or normalise before masking."
            )
        x = inputs.movedim(layer.axis, 1).to(room.dtype)
        gamma = layer.gamma.value if layer.scale else x.new_ones(room.channels)
        beta = layer.beta.value if layer.center else x.new_zeros(room.channels)
        norm: Any = GlobalNorm.apply
        y, mean, var = norm(x, gamma, beta, layer.epsilon, room, replica.share)
        with torch.no_grad():
            for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, var)):
                old = moving.value
                old.copy_(old * layer.momentum + new.to(old.dtype) * (1.0 - layer.momentum))
        return keras.ops.cast(y.movedim(1, layer.axis), layer.compute_dtype)

    return call
