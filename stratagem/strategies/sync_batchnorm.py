"""Batch normalisation over the global batch, exact for unequal and for empty shares.

Each replica sends mean, sum of squared deviations and count of its share, from which the global
mean and variance follow without cancellation:

    n = sum n_r      mean = sum n_r mean_r / n      M2 = sum M2_r + sum n_r (mean_r - mean)^2

Backward needs two sums over the global batch, of dy and of dy * xhat. Where a replica's loss is a
mean over its own share, its dy counts with the weight w_r that its gradient will be given:
all_reduce(w_r * sum) / w_r.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stratagem.strategies.replica import Replica, Share
from stratagem.wire.collective import Collective


class GlobalNorm(torch.autograd.Function):
    """Axis 1 is the channels'; returns the output, the global mean and the (biased) variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, room: Room, share: Share
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var, count = room.statistics(x, share.examples > 0)
        inv = torch.rsqrt(var + eps)
        shape = _broadcast_shape(x)
        xhat = (x.to(room.dtype) - mean.view(shape)) * inv.view(shape)
        ctx.save_for_backward(xhat, weight, inv)
        ctx.room, ctx.weight_of_share, ctx.count = room, share.weight, count
        y = xhat * weight.to(room.dtype).view(shape) + bias.to(room.dtype).view(shape)
        room.count = count
        ctx.mark_non_differentiable(mean, var)
        return y.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dy = grads[0].to(ctx.room.dtype)
        xhat, weight, inv = ctx.saved_tensors
        shape, axes = _broadcast_shape(dy), _other_axes(dy)
        d_bias, d_weight = dy.sum(axes), (dy * xhat).sum(axes)
        w = ctx.weight_of_share
        sums = ctx.room.add_up(torch.cat([d_bias, d_weight]), w)
        sums = sums / (ctx.count * w) if w else torch.zeros_like(sums)
        mean_dy, mean_dyx = sums.chunk(2)
        scale = (weight.to(dy.dtype) * inv).view(shape)
        dx = (dy - mean_dy.view(shape) - xhat * mean_dyx.view(shape)) * scale
        d_parameters = d_weight.to(weight.dtype), d_bias.to(weight.dtype)
        return dx.to(grads[0].dtype), *d_parameters, None, None, None


class Room:
    """Storage for one layer's sums, made once: a row a replica forward, one row backward."""

    def __init__(
        self, collective: Collective, channels: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.collective, self.channels = collective, channels
        #: the type of the sums: at least fp32
        self.dtype = torch.float64 if dtype is torch.float64 else torch.float32
        #: values a channel in the last global batch
        self.count = 0.0
        width = 2 * self.channels + 1
        self._rows = collective.buffer(collective.size * width, self.dtype, device)
        self._sums = collective.buffer(2 * self.channels, self.dtype, device)

    def statistics(self, x: Tensor, counts: bool) -> tuple[Tensor, Tensor, float]:
        size, rank = self.collective.size, self.collective.rank
        rows = self._rows.view(size, -1)
        rows.zero_()
        if counts:
            var, mean = torch.var_mean(x.to(self.dtype), _other_axes(x), correction=0)
            own = x.numel() // self.channels
            rows[rank] = torch.cat([mean, var * own, rows.new_tensor([own])])
        self.collective.all_reduce(self._rows).wait()
        c = self.channels
        means, deviations, n = rows[:, :c], rows[:, c : 2 * c], rows[:, 2 * c :]
        total = n.sum()
        mean = (means * n).sum(0) / total
        m2 = deviations.sum(0) + (n * (means - mean) ** 2).sum(0)
        return mean, m2 / total, float(total)

    def add_up(self, sums: Tensor, weight: float) -> Tensor:
        self._sums.copy_(sums)
        self.collective.all_reduce(self._sums, weight).wait()
        return self._sums.clone()


def _type(layer: _BatchNorm) -> torch.dtype:
    state = [t for t in (layer.weight, layer.running_mean) if t is not None]
    return state[0].dtype if state else torch.float32


def _other_axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _broadcast_shape(x: Tensor) -> list[int]:
    return [1, x.shape[1]] + [1] * (x.dim() - 2)


def install(module: nn.Module, replica: Replica) -> Callable[[], None]:
    """Synchronise every BatchNorm layer; returns what takes it back. Collective."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    if not layers or replica.count == 1:
        return lambda: None
    side = replica.beside()
    for layer in layers:
        room = Room(side, layer.num_features, _type(layer), replica.device)
        layer.__dict__["forward"] = _forward(layer, room, replica)

    def remove() -> None:
        for layer in layers:
            del layer.__dict__["forward"]

    return remove


def _forward(layer: _BatchNorm, room: Room, replica: Replica) -> Callable[[Tensor], Tensor]:
    plain = layer.forward

    def forward(x: Tensor) -> Tensor:
        if not layer.training:
            return plain(x)
        weight = layer.weight if layer.affine else x.new_ones(layer.num_features)
        bias = layer.bias if layer.affine else x.new_zeros(layer.num_features)
        norm: Any = GlobalNorm.apply
        y, mean, var = norm(x, weight, bias, layer.eps, room, replica.share)
        _track(layer, mean, var * (room.count / max(room.count - 1.0, 1.0)))
        return y  # type: ignore[no-any-return]

    return forward


@torch.no_grad()
def _track(layer: _BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    if momentum is None:
        momentum = 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
