"""Exact losses over replicas where Keras divides by something else than the number of examples.

Keras averages a loss over its own batch: by the number of values, by the number of values that a
mask leaves, or by the sum of the sample weights. A replica sees a share only. Its gradient counts
with the weight examples / total, so that

    plain mean      needs nothing: the weighted mean of the shares' means is the mean
    sum             has to be multiplied by total / examples
    masked, by      has to be multiplied by d_r / (sum of all d_r) * total / examples, where d_r
    weights         is this share's divisor; the replicas add the d_r up

A part of a batch that goes to servers is left as Keras computes it from its rows alone, and its
gradient g has the weight w = d_r: a server makes sum(w g) / sum(w), which is the gradient of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shares import rows, share
from stratagem.errors import NotDistributable
from stratagem.training.replica import Replica, Share
from stratagem.training.sync_batchnorm import GlobalNorm, Room

# --- parts of a batch --------------------------------------------------------------------------


class BatchPart:
    """The part of a batch that a worker computes."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        #: examples of the part and of its batch; this device's share of the batch
        self.examples = self.total = 1
        self.share = Share(1, 1, 1.0)
        #: for each loss so far: what it was divided by, None for the number of examples
        self._divisors: list[float | None] = []

    def begin(self, examples: int, total: int) -> None:
        self.examples, self.total = examples, total
        self.share.set(examples, total)
        self._divisors = []

    @property
    def whole(self) -> bool:
        """Whether it is a batch by itself."""
        return self.examples == self.total

    @property
    def plain(self) -> bool:
        """Whether one device has a batch by itself, so that nothing is to be made exact."""
        return self.whole

    def rows(self, data: Any) -> Any:
        """Return this device's rows of the part."""
        return data

    def divided(self, by: float | None) -> float | None:
        """Note the divisor of a loss; returns the loss' factor, None if the divisor is 0."""
        self._divisors.append(by)
        return 1.0 if by is None or by else None

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Gather a tensor of every share."""
        if not self.whole:
            _refuse_mask_in_weights()
        return self.replica.all_gather(own)

    def notes(self, model: Any, loss: float) -> list[float]:
        """Return numerator and denominator of a loss; the denominator is the weight of this part's
        gradient in its batch."""
        weight = self._weight(model, self._divisors, self.examples)
        return [loss * weight, weight]

    def _weight(self, model: Any, divisors: list[float | None], examples: int) -> float:
        own = [by for by in divisors if by is not None]
        if self.whole or not own:
            return float(examples)
        added = any(getattr(layer, "_losses", None) for layer in model._flatten_layers())
        if len(divisors) > 1 or added:
            raise NotDistributable(
                "the model has several losses, and one of them is divided by a mask or by the "
                "sample weights, so the parts of a batch do not weigh the same for each; use "
                "Asynchronous(), whose workers get whole batches, or MirroredStrategy."
            )
        return own[0]


class SharedPart(BatchPart):
    """A part of a batch, or a whole one, that several devices share by its rows.

    A device's gradient counts with its share of the part's examples.
    """

    def begin(self, examples: int, total: int) -> None:
        super().begin(examples, total)
        self._start, self._end = share(examples, self.replica.count, self.replica.index)
        self.replica.share.set(self._end - self._start, examples)
        self.share.set(self._end - self._start, total)
        #: like `_divisors`, of this device's share alone
        self._own: list[float | None] = []

    @property
    def plain(self) -> bool:
        return False

    def rows(self, data: Any) -> Any:
        if self._end > self._start:
            return rows(data, self._start, self._end)
        return rows(data, 0, 1)  # an empty share borrows a row, which weighs nothing

    def divided(self, by: float | None) -> float | None:
        """Add the devices' divisors up. Collective if there are any."""
        mine = by if by is None or self.share.examples else 0.0
        self._own.append(mine)
        if mine is None:
            return super().divided(None)
        sums = self.replica.all_gather(torch.tensor(mine, dtype=torch.float64))
        total = float(torch.stack(sums).sum())
        factor = super().divided(total)
        if not total and self.whole:
            return 1.0  # as one device has it
        if factor is None or not mine:
            return None
        return mine / total * self.examples / self.share.examples

    def notes(self, model: Any, loss: float) -> list[float]:
        """Return this device's summands of numerator and denominator."""
        above, _ = super().notes(model, loss)
        below = self._weight(model, self._own, self.share.examples)
        return [above * self.replica.share.weight, below]


def _refuse_mask_in_weights() -> None:
    """Refuse a mask with sample weights: weighted metrics see a factor of the whole batch."""
    raise NotDistributable(
        "this batch has a mask and sample weights, which Keras multiplies with a factor of the "
        "whole batch, and a worker has a part of it; use Asynchronous(), whose workers get whole "
        "batches, or MirroredStrategy."
    )


# --- losses ------------------------------------------------------------------------------------


_playing: BatchPart | None = None


@contextmanager
def made_exact(part: BatchPart) -> Iterator[None]:
    """Make every Keras loss in the block this part's share of the global one."""
    global _playing
    _install()
    before, _playing = _playing, part
    try:
        yield
    finally:
        _playing = before


def _install() -> None:
    """Patch Keras once a process; outside of `made_exact` the methods are Keras' own."""
    if not getattr(keras.losses.Loss.__call__, "stratagem", False):
        _install_loss()
        _install_mean()


def _install_mean() -> None:
    """Weigh a number given to `Mean` without weights by its share: Keras counts it as a batch."""
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
        mask = _joint_mask(y_pred, values[-1])
        if isinstance(weight, Tensor) and weight._version != written:
            _retouch(sample_weight, weight, mask, self.reduction, _playing)
        factor = _factor(self.reduction, values[-1], mask, sample_weight, _playing)
        return values[-1].sum() * 0.0 if factor is None else loss * factor

    call.stratagem = True  # type: ignore[attr-defined]
    keras.losses.Loss.__call__ = call


def _joint_mask(*values: Any) -> Tensor | None:
    found = (getattr(value, "_keras_mask", None) for value in values)
    masks = [torch.as_tensor(mask) for mask in found if mask is not None]
    if len(masks) == 2:
        return masks[0] & masks[1]
    return masks[0] if masks else None


def _retouch(
    weight: Tensor,
    written: Tensor,
    mask: Tensor | None,
    reduction: str,
    part: BatchPart,
) -> None:
    """Some versions of Keras multiply a mask into the sample weights in place, together with the
    factor places / unmasked places, and metrics read them afterwards: as on one device, but with
    the factor of the global batch."""
    factor = 1.0
    if mask is not None and reduction in ("mean", "sum_over_batch_size"):
        own = torch.tensor([mask.numel(), float(mask.sum())], dtype=torch.float64)
        if not part.share.examples:
            own.zero_()
        places, unmasked = torch.stack(part.gathered(own)).sum(0)
        if own[1] and unmasked:
            factor = float(places / unmasked * own[1] / own[0])
    weight.copy_(written.detach() * factor)


def _factor(
    reduction: str | None, values: Any, mask: Any, sample_weight: Any, part: BatchPart
) -> float | None:
    """Return the factor of this share's loss; None if this share's divisor is 0 and the global
    batch's is not. Collective if there is a divisor."""
    plain = not values.shape or reduction in (None, "none", "sum")
    factor = part.divided(None if plain else _divisor(str(reduction), values, mask, sample_weight))
    if values.shape and reduction == "sum" and part.share.examples:
        return part.share.total / part.share.examples
    return factor


@contextmanager
def whole_activity(model: Any, part: BatchPart) -> Iterator[None]:
    """Scale activity regularisers in a step by total / examples: older Keras sums over rows."""
    share = part.share
    regular = (
        []
        if _averages_activity() or not share.examples
        else [layer for layer in model._flatten_layers() if layer.activity_regularizer is not None]
    )
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
    """Whether this Keras divides activity regularisers by the number of rows."""
    losses = []
    for count in (1, 2):
        layer = keras.layers.Activation("linear", activity_regularizer="l2")
        layer(torch.ones(count, 1))
        losses.append(float(layer.losses[0]))
    return losses[0] == losses[1]


def _divisor(reduction: str, values: Any, mask: Tensor | None, sample_weight: Any) -> float | None:
    """Return Keras' divisor; None if it is the number of values, proportional to the examples."""
    if reduction != "mean_with_sample_weight" or sample_weight is None:
        return None if mask is None else float(mask.sum())
    weight = torch.as_tensor(sample_weight).to(values.device, torch.float64)
    if mask is not None:
        kept, weight = _same_rank(mask.to(values.device, torch.float64), weight)
        weight = weight * kept
    return float(_same_rank(values, weight)[1].sum())


def _same_rank(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Add or remove a last axis of length one, as Keras does."""
    if a.dim() == b.dim() + 1:
        return (
            (a, b.unsqueeze(-1))
            if a.shape[-1] == 1 and b.dim() == 1
            else ((a.squeeze(-1), b) if a.shape[-1] == 1 else (a, b))
        )
    if b.dim() == a.dim() + 1:
        b_, a_ = _same_rank(b, a)
        return a_, b_
    return a, b


# --- batch normalization -----------------------------------------------------------------------


def synchronise(model: Any, replica: Replica, active: Callable[[], bool]) -> Callable[[], None]:
    """Synchronise every BatchNormalization layer; returns a function that undoes it. Collective.

    Only while `active`: outside of a step the chief alone calls layers.
    """
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
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
