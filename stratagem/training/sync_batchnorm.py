"""Batch normalisation over the global batch, exact for unequal and for empty shares.

Each replica sends mean, sum of squared deviations and count of its share, from which the global
mean and variance follow without cancellation:

    n = sum n_r      mean = sum n_r mean_r / n      M2 = sum M2_r + sum n_r (mean_r - mean)^2

Backward needs two sums over the global batch, of dy and of dy * xhat. Where a replica's loss is a
mean over its own share, its dy counts with the weight w_r that its gradient will be given:
all_reduce(w_r * sum) / w_r.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from stratagem.compat.torch_names import BatchNorm
from stratagem.errors import NotDistributable, UsageError
from stratagem.training.replica import Replica, Share, current_replica
from stratagem.wire.collective import Collective

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class GlobalNorm(torch.autograd.Function):
    """Normalises axis 1 over the global batch; also returns its mean and (biased) variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, room: Room, share: Share
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var, count = room.statistics(x, share)
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
    """One layer's buffers for sums: forward a row for each replica, backward one row."""

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

    def statistics(self, x: Tensor, share: Share) -> tuple[Tensor, Tensor, float]:
        size, rank = self.collective.size, self.collective.rank
        rows = self._rows.view(size, -1)
        rows.zero_()
        # a batch that was not cut into shares may be whole on every replica
        same_rows = not share.announced
        if share.examples > 0:
            var, mean = torch.var_mean(x.to(self.dtype), _other_axes(x), correction=0)
            own = x.numel() // self.channels
            rows[rank] = torch.cat([mean, var * own, rows.new_tensor([own])])
        self._all_reduce(self._rows)
        c = self.channels
        means, deviations, n = rows[:, :c], rows[:, c : 2 * c], rows[:, 2 * c :]
        total = n.sum()
        if same_rows and bool((rows == rows[:1]).all()):
            total = n[0]  # every replica has the same rows
            return means[0], deviations[0] / total, float(total)
        mean = (means * n).sum(0) / total
        m2 = deviations.sum(0) + (n * (means - mean) ** 2).sum(0)
        return mean, m2 / total, float(total)

    def add_up(self, sums: Tensor, weight: float) -> Tensor:
        self._sums.copy_(sums)
        self._all_reduce(self._sums, weight)
        return self._sums.clone()

    def _all_reduce(self, sums: Tensor, weight: float = 1.0) -> None:
        try:
            self.collective.all_reduce(sums, weight).wait()
        except UsageError as error:
            raise UsageError(
                "call model.eval() before a forward pass that one replica makes alone (the "
                "chief's, to log something), or make it on all: with sync_batchnorm=True a "
                f"BatchNorm layer in train mode adds up over all replicas. {error}"
            ) from error


def _type(layer: BatchNorm) -> torch.dtype:
    state = [t for t in (layer.weight, layer.running_mean) if t is not None]
    return state[0].dtype if state else torch.float32


def _other_axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _broadcast_shape(x: Tensor) -> list[int]:
    return [1, x.shape[1]] + [1] * (x.dim() - 2)


class _Synced:
    """Runs forward over the global batch, on its replica; elsewhere (after the call, after a
    failure) as the plain layer. Base of the class that replaces a layer's own meanwhile.

    Copies and pickles have the layer's own class: a model that is averaged, saved or sent elsewhere
    is plain.
    """

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        link = _links[layer]
        if current_replica() is not link.replica:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        if layer.training:
            return _normalise(layer, x, link)
        if layer.running_mean is None and layer.running_var is None:
            raise _no_statistics(layer)
        return super().forward(x)  # type: ignore[misc, no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        layer: Any = self
        replaced = type(layer)
        layer.__class__ = _links[layer].plain
        try:
            return layer.__reduce_ex__(1)  # pickle would find that a later form's type is not ours
        finally:
            layer.__class__ = replaced


class _Weighed(_Synced):
    """An InstanceNorm that tracks: its statistics are means over rows, so those of each share go in
    with the share's rows, and the mean over replicas is that of one device."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        y: Tensor
        replica, share = _links[layer].replica, _links[layer].replica.share
        plain = _links[layer].plain.forward
        if current_replica() is not replica or not (layer.training and tracks(layer)):
            y = plain(layer, x)
            return y
        tracked = layer.running_mean, layer.running_var
        befores = [each.clone() for each in tracked]
        y = plain(layer, x)
        with torch.no_grad():
            for now, before in zip(tracked, befores, strict=True):
                kept = before * (1.0 - (layer.momentum or 0.0))
                now.sub_(kept).mul_(replica.count * share.examples / share.total).add_(kept)
        return y


class _Link(NamedTuple):
    """What a synchronised layer needs; kept beside the layer, so that copies do not have it."""

    plain: type[Any]
    replica: Replica
    #: of a BatchNorm
    room: Room | None = None


_links: weakref.WeakKeyDictionary[nn.Module, _Link] = weakref.WeakKeyDictionary()


def install(module: nn.Module, replica: Replica, synced: bool = True) -> Callable[[], None]:
    """Synchronise every BatchNorm layer if `synced`, instead of what an earlier call did, and weigh
    what InstanceNorm tracks; return a function that undoes this, which may be called twice.
    Collective."""
    layers = [m for m in module.modules() if isinstance(m, (BatchNorm, *INSTANCE_NORMS))]
    for layer in layers:
        _remove(layer, _links.get(layer))
    layers = [m for m in layers if (synced if isinstance(m, BatchNorm) else tracks(m))]
    if not layers or replica.count == 1:
        return lambda: None
    side, links = replica.beside() if synced else replica.collective, []
    for layer in layers:
        room: Room | None = None
        kind: type[Any] = _Weighed
        if isinstance(layer, BatchNorm):
            room = Room(side, layer.num_features, _type(layer), replica.device)
            kind = _Synced
        links.append(link := _Link(type(layer), replica, room))
        _links[layer] = link
        # of this module and not of torch's: its forward is not torch's code (gradient_placement.py)
        home = {"__module__": __name__}
        layer.__class__ = type(link.plain.__name__, (kind, link.plain), home)

    def remove() -> None:
        for layer, link in zip(layers, links, strict=True):
            _remove(layer, link)

    return remove


def tracks(layer: nn.Module) -> bool:
    """Whether training writes a norm's running statistics."""
    return bool(layer.track_running_stats) and layer.running_mean is not None


def weighs_statistics(module: nn.Module) -> bool:
    """Whether a replica without rows needs a borrowed one, so that its statistics go on."""
    return any(isinstance(m, INSTANCE_NORMS) and tracks(m) for m in module.modules())


def _remove(layer: nn.Module, link: _Link | None) -> None:
    """Make a layer plain again, if it still has this link."""
    if link is not None and _links.get(layer) is link:
        layer.__class__ = link.plain
        del _links[layer]


def check_statistics(module: nn.Module) -> None:
    """Refuse layers that replicas cannot evaluate as one device does."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and layer.running_mean is None:
            raise _no_statistics(layer)


def _no_statistics(layer: BatchNorm) -> NotDistributable:
    return NotDistributable(
        f"a {type(layer).__name__} with track_running_stats=False normalises over the batch in "
        "eval mode, too, where each replica has its own share; let it track them, or evaluate a "
        "copy on one device: sg.Model(copy.deepcopy(module)), without a strategy."
    )


def _normalise(layer: BatchNorm, x: Tensor, link: _Link) -> Tensor:
    weight = layer.weight if layer.affine else x.new_ones(layer.num_features)
    bias = layer.bias if layer.affine else x.new_zeros(layer.num_features)
    room, norm = cast(Room, link.room), cast(Any, GlobalNorm.apply)
    y, mean, var = norm(x, weight, bias, layer.eps, room, link.replica.share)
    if room.count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {x.shape}")
    _track(layer, mean, var * (room.count / max(room.count - 1.0, 1.0)))
    return y  # type: ignore[no-any-return]


@torch.no_grad()
def _track(layer: BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None or not layer.track_running_stats:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    if momentum is None:
        momentum = 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
