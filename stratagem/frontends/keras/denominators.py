"""Losses that divide by something else than the number of examples, made exact over replicas.

Keras averages a loss over its own batch: by the number of values, by the number of values that a
mask leaves, or by the sum of the sample weights. A replica sees a share only. Its gradient counts
with the weight examples / total, so that

    plain mean      needs nothing: the weighted mean of the shares' means is the mean
    sum             has to be multiplied by total / examples
    masked, by      has to be multiplied by d_r / (sum of all d_r) * total / examples, where d_r
    weights         is what this share was divided by; the replicas add the d_r up
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.frontends.keras.parts import Part, refuse_mask_in_weights
from stratagem.frontends.proof import check_mean
from stratagem.strategies.replica import Replica

_playing: Replica | Part | None = None
#: losses of the user's own that were found to be means over rows
_proven: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def made_exact(replica: Replica | Part) -> Iterator[None]:
    """Within the block every Keras loss is this replica's part of the global one."""
    global _playing
    _install()
    before, _playing = _playing, replica
    try:
        yield
    finally:
        _playing = before


def _install() -> None:
    """Once a process; without a replica the methods do what they always did."""
    if not getattr(keras.losses.Loss.__call__, "stratagem", False):
        _install_loss()
        _install_mean()


def _install_mean() -> None:
    """A metric that is given one number a batch counts batches: here shares, by their weight."""
    plain = keras.metrics.Mean.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        if _playing is not None and sample_weight is None and not getattr(values, "shape", ()):
            sample_weight = _playing.share.weight
        return plain(self, values, sample_weight=sample_weight)

    keras.metrics.Mean.update_state = update_state


def _install_loss() -> None:
    plain = keras.losses.Loss.__call__

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if _playing is None:
            return plain(self, y_true, y_pred, sample_weight)
        values: list[Any] = []
        own = self.call

        def listening(y_true: Any, y_pred: Any) -> Any:
            values.append(own(y_true, y_pred))
            return values[-1]

        weight = sample_weight.clone() if isinstance(sample_weight, Tensor) else sample_weight
        written = getattr(weight, "_version", 0)
        self.__dict__["call"] = listening
        try:
            loss = plain(self, y_true, y_pred, weight)
        finally:
            del self.__dict__["call"]
        if not values[-1].shape:
            _prove(self, own, y_true, y_pred, values[-1], _playing)
        mask = _joint_mask(y_pred, values[-1])
        if isinstance(weight, Tensor) and weight._version != written:
            _retouch(sample_weight, weight, mask, self.reduction, _playing)
        factor = _factor(self.reduction, values[-1], mask, sample_weight, _playing)
        return values[-1].sum() * 0.0 if factor is None else loss * factor

    call.stratagem = True  # type: ignore[attr-defined]
    keras.losses.Loss.__call__ = call


@torch.no_grad()
def _prove(
    loss: Any, own: Any, y_true: Any, y_pred: Any, whole: Tensor, replica: Replica | Part
) -> None:
    """One number for a share must be the mean over its rows; the chief tries that once."""
    count = replica.share.examples
    if not replica.is_chief or loss in _proven or count < 2:
        return
    if isinstance(y_true, Tensor) and isinstance(y_pred, Tensor):
        device = replica.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            check_mean(own, [y_true.to(whole.dtype), y_pred.detach().to(whole.dtype)], count, whole)
    _proven.add(loss)


def _joint_mask(*values: Any) -> Tensor | None:
    found = (getattr(value, "_keras_mask", None) for value in values)
    masks = [torch.as_tensor(mask) for mask in found if mask is not None]
    if len(masks) == 2:
        return masks[0] & masks[1]
    return masks[0] if masks else None


def _retouch(
    weight: Tensor, written: Tensor, mask: Tensor | None, reduction: str, replica: Replica | Part
) -> None:
    """Some versions of Keras multiply a mask into the sample weights in place, together with the
    factor places / unmasked places, and metrics read them afterwards: as on one device, but with
    the factor of the global batch."""
    factor = 1.0
    if mask is not None and reduction in ("mean", "sum_over_batch_size"):
        if isinstance(replica, Part):
            if not replica.whole:
                refuse_mask_in_weights()
            replica = replica.replica
        own = torch.tensor([mask.numel(), float(mask.sum())], dtype=torch.float64)
        if not replica.share.examples:
            own.zero_()
        places, unmasked = torch.stack(replica.all_gather(own)).sum(0)
        if own[1] and unmasked:
            factor = float(places / unmasked * own[1] / own[0])
    weight.copy_(written.detach() * factor)


def _factor(
    reduction: str | None, values: Any, mask: Any, sample_weight: Any, replica: Replica | Part
) -> float | None:
    """What this share's loss is multiplied by; None if Keras had nothing to divide by, where the
    global batch has. Collective where a sum is needed."""
    share = replica.share
    plain = not values.shape or reduction in (None, "none", "sum")
    own = None if plain else _divisor(str(reduction), values, mask, sample_weight)
    grows = values.shape and reduction == "sum" and share.examples
    if isinstance(replica, Part):
        factor = replica.divided(own)
        return share.total / share.examples if grows else factor
    if plain:
        return share.total / share.examples if grows else 1.0
    if own is None:
        return 1.0
    sums = replica.all_gather(torch.tensor(own if share.examples else 0.0, dtype=torch.float64))
    total = float(torch.stack(sums).sum())
    if not total or not share.examples:
        return 1.0
    return own / total * share.total / share.examples if own else None


@contextmanager
def whole_activity(model: Any, replica: Replica | Part) -> Iterator[None]:
    """Older Keras adds activity regularisers up over the batch: a share stands for all of it.

    Only for a step: a layer that is saved must have its own regulariser.
    """
    share = replica.share
    regular = [] if _averages_activity() or not share.examples else [
        layer for layer in model._flatten_layers() if layer.activity_regularizer is not None
    ]  # fmt: skip
    own = [layer.activity_regularizer for layer in regular]
    for layer, plain in zip(regular, own, strict=True):
        layer.__dict__["activity_regularizer"] = _times(plain, share.total / share.examples)
    try:
        yield
    finally:
        for layer, plain in zip(regular, own, strict=True):
            layer.__dict__["activity_regularizer"] = plain


def _times(function: Callable[[Any], Any], factor: float) -> Callable[[Any], Any]:
    return lambda outputs: function(outputs) * factor


@cache
def _averages_activity() -> bool:
    """Whether this Keras divides by the number of rows."""
    losses = []
    for count in (1, 2):
        layer = keras.layers.Activation("linear", activity_regularizer="l2")
        layer(torch.ones(count, 1))
        losses.append(float(layer.losses[0]))
    return losses[0] == losses[1]


def _divisor(
    reduction: str, values: Any, mask: Tensor | None, sample_weight: Any
) -> float | None:
    """What Keras divides by; None if that is the number of values, which follows the examples."""
    if reduction != "mean_with_sample_weight" or sample_weight is None:
        return None if mask is None else float(mask.sum())
    weight = torch.as_tensor(sample_weight).to(values.device, torch.float64)
    if mask is not None:
        kept, weight = _same_rank(mask.to(values.device, torch.float64), weight)
        weight = weight * kept
    return float(_same_rank(values, weight)[1].sum())


def _same_rank(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A last axis of length one is added or taken away, as Keras does it."""
    if a.dim() == b.dim() + 1:
        return (a, b.unsqueeze(-1)) if a.shape[-1] == 1 and b.dim() == 1 else (
            (a.squeeze(-1), b) if a.shape[-1] == 1 else (a, b)
        )
    if b.dim() == a.dim() + 1:
        b_, a_ = _same_rank(b, a)
        return a_, b_
    return a, b
