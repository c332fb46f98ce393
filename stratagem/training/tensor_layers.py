"""Layers of which each process computes a part.

    columns   by outputs: the input is whole, the output divided; a convolution by its channels
    rows      by inputs: the input is divided, and the parts of the output are added up
    heads     attention: projections by columns, heads apart, the output's projection by rows

Dropout on a divided value draws for the whole one and takes its part: numbers are those of one
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from stratagem.state.divided_update import Division
from stratagem.wire.shared_scratch import SharedScratch

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
#: this process' part of a layer's tensor, by its name
Own = Callable[[str], Any]
_CONVOLVE: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def widths(layer: nn.Module) -> dict[str, int]:
    """The ways in which a layer can be divided, and the most parts for each."""
    if type(layer) is nn.Linear:
        return {"columns": layer.out_features, "rows": layer.in_features}
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        assert isinstance(layer, Convolution)
        plain = layer.groups == 1 and layer.padding_mode == "zeros"
        return {"columns": layer.out_channels, "rows": layer.in_channels} if plain else {}
    if type(layer) is nn.Embedding and not layer.sparse and layer.max_norm is None:
        by_rows = {} if layer.scale_grad_by_freq else {"rows": layer.num_embeddings}
        return {"columns": layer.embedding_dim, **by_rows}
    if type(layer) is nn.MultiheadAttention and layer.in_proj_weight is not None:
        plain = layer.bias_k is None and not layer.add_zero_attn
        return {"columns": layer.num_heads} if plain else {}
    return {}


def divisions(layer: Any, how: str, bounds: tuple[int, ...]) -> dict[str, Division | None]:
    """How each parameter of a layer is divided; None: it stays whole."""

    def along(dim: int, name: str, *shape: int) -> Division:
        return Division(shape or tuple(layer.get_parameter(name).shape), dim, bounds)

    if isinstance(layer, nn.MultiheadAttention):
        width, head = layer.embed_dim, layer.head_dim
        bounds = tuple(b * head for b in bounds)
        found: dict[str, Division | None] = {
            "in_proj_weight": along(1, "in_proj_weight", 3, width, width),
            "out_proj.weight": along(1, "out_proj.weight"),
        }
        if layer.in_proj_bias is not None:
            found |= {"in_proj_bias": along(1, "in_proj_bias", 3, width), "out_proj.bias": None}
        return found
    names = [name for name, _ in layer.named_parameters()]
    by_first = (how == "columns") != isinstance(layer, nn.Embedding)
    if by_first:
        return {name: along(0, name) for name in names}
    return {name: along(1, name) if name == "weight" else None for name in names}


class DividedProduct(nn.Module):
    """A linear layer or a convolution, by its outputs or by its inputs."""

    def __init__(
        self, layer: nn.Linear | Convolution, how: str, own: Own, group: SharedScratch
    ) -> None:
        super().__init__()
        self.weight, self.bias = own("weight"), own("bias")
        self._columns, self._group = how == "columns", group
        self._product: Callable[..., Tensor] = F.linear
        if not isinstance(layer, nn.Linear):
            options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
            self._product = partial(_CONVOLVE[self.weight.dim()], **options)

    def forward(self, x: Tensor) -> Any:
        if self._columns:
            return self._product(x, self.weight, self.bias)
        found = sum_of_parts(self._product(x, self.weight), self._group)
        if self.bias is None:
            return found
        return found + self.bias.view(-1, *[1] * (self.weight.dim() - 2))


class DividedEmbedding(nn.Module):
    """An embedding, by its columns (parts of every vector) or by its rows (some of the words)."""

    def __init__(
        self, layer: nn.Embedding, how: str, own: Own, group: SharedScratch, first: int
    ) -> None:
        super().__init__()
        self.weight = own("weight")
        self._columns, self._group, self._words = how == "columns", group, layer.num_embeddings
        self._first = 0 if self._columns else first
        self._pad, self._by_frequency = layer.padding_idx, layer.scale_grad_by_freq

    def forward(self, x: Tensor) -> Any:
        pad, count = self._pad, len(self.weight)
        if pad is not None:
            pad = pad - self._first if 0 <= pad - self._first < count else None
        if self._columns:
            return F.embedding(x, self.weight, pad, scale_grad_by_freq=self._by_frequency)
        if bool(((x < 0) | (x >= self._words)).any()):
            raise IndexError(f"index out of range: an embedding of {self._words} rows")
        place = x - self._first
        away = (place < 0) | (place >= count)
        found = F.embedding(place.masked_fill(away, 0), self.weight, pad)
        return sum_of_parts(found.masked_fill(away.unsqueeze(-1), 0.0), self._group)


class DividedNorm(nn.Module):
    """BatchNorm of some of the channels: every process sees all rows, so it is exact."""

    def __init__(self, layer: Norm, own: Own) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that its whole parameters are not registered here
        self.weight, self.bias = own("weight"), own("bias")
        self._mean, self._var = own("running_mean"), own("running_var")

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self._layer
        rate = layer.momentum
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if rate is None:
                rate = 1.0 / float(layer.num_batches_tracked)
        by_batch = layer.training or self._mean is None
        mean, var = self._mean, self._var
        return F.batch_norm(
            x, mean, var, self.weight, self.bias, by_batch, 0.0 if rate is None else rate, layer.eps
        )


class DividedDropout(nn.Module):
    """Dropout of a part, with the random numbers that one device draws for the whole."""

    def __init__(self, p: float, active: Callable[[], bool], split: Split, rank: int) -> None:
        super().__init__()
        self._p, self._active, self._split, self._rank = p, active, split, rank

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self._p, self._split, self._rank) if self._active() else x


def dropped(x: Tensor, p: float, split: Split, rank: int) -> Tensor:
    """Dropout of a part, as the whole value's dropout would affect it."""
    if p == 0.0:
        return x
    shape = list(x.shape)
    shape[split.dim] = split.whole
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])  # drawn in memory order
    back = sorted(range(x.dim()), key=order.__getitem__)
    ones = torch.ones([shape[dim] for dim in order], dtype=x.dtype).permute(back)
    return x * split.part(F.dropout(ones, p), rank)


class DividedAttention(nn.Module):
    """Some heads of an nn.MultiheadAttention."""

    def __init__(
        self, layer: nn.MultiheadAttention, own: Own, heads: Split, group: SharedScratch
    ) -> None:
        super().__init__()
        self._layer = [layer]
        self.in_proj_weight, self.in_proj_bias = own("in_proj_weight"), own("in_proj_bias")
        self.weight, self.bias = own("out_proj.weight"), own("out_proj.bias")
        self._heads, self._group = heads, group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, None]:
        """Return no weights: attention whose weights are used is not divided. `attn_mask` has the
        causal mask."""
        (layer,) = self._layer
        given = (query, key, value)
        if not layer.batch_first:
            query, key, value = (x.transpose(0, 1) for x in given)
        q, k, v = (self._projected(i, x) for i, x in enumerate((query, key, value)))
        mask = self._mask(attn_mask, key_padding_mask, q)
        if layer.training and layer.dropout > 0.0:
            scores = q @ k.transpose(-2, -1) / math.sqrt(layer.head_dim)
            weights = _softmax(scores, mask)
            found = dropped(weights, layer.dropout, self._heads, self._group.rank) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        joined = found.permute(2, 0, 1, 3).flatten(2)  # positions first, as torch's own lie
        output = sum_of_parts(F.linear(joined, self.weight), self._group)
        output = output if self.bias is None else output + self.bias
        return (output.transpose(0, 1) if layer.batch_first else output), None

    def _projected(self, place: int, x: Tensor) -> Tensor:
        """(row, head, position, feature) of the heads of this process."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[place]
        made = F.linear(x, self.in_proj_weight[place], bias)
        return made.view(*made.shape[:2], -1, self._layer[0].head_dim).transpose(1, 2)

    def _mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """The mask that is added to the scores, if any."""
        found = None
        if attention is not None:
            found = _added(attention, q)
            if found.dim() == 3:  # a mask for each row and head
                found = found.view(len(q), -1, *found.shape[1:])
                found = self._heads.part(found, self._group.rank)
        if padding is not None:
            hidden = _added(padding, q)[:, None, None, :]
            found = hidden if found is None else found + hidden
        return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Attention weights; all zero for a query whose keys are all masked, as torch has it."""
    if mask is None:
        return scores.softmax(-1)
    blind = (mask == -math.inf).all(-1, keepdim=True)
    return (scores + mask.masked_fill(blind, 0.0)).softmax(-1).masked_fill(blind, 0.0)


def divided_layer(
    layer: Any, how: str, own: Own, group: SharedScratch, bounds: tuple[int, ...]
) -> nn.Module:
    """The part of a layer that this process computes."""
    if isinstance(layer, nn.Embedding):
        return DividedEmbedding(layer, how, own, group, bounds[group.rank])
    if isinstance(layer, nn.MultiheadAttention):
        return DividedAttention(layer, own, Split(1, bounds), group)
    if isinstance(layer, Norm):
        return DividedNorm(layer, own)
    assert isinstance(layer, nn.Linear | Convolution)
    return DividedProduct(layer, how, own, group)


# --- communication between processes: four operations --------------------------------------------
#
#     operation   forward                          backward
#     Enter       whole, unchanged                 all-reduce the gradient
#     Sum         all-reduce the parts             whole, unchanged
#     Gather      all-gather the parts             this process' part of the gradient
#     Scatter     this process' part               all-gather the gradient
#
# A whole value is the same on all processes, and so is its gradient.


@dataclass(frozen=True)
class Split:
    """How a value is divided over processes: along an axis, at these bounds."""

    dim: int
    bounds: tuple[int, ...]

    @property
    def whole(self) -> int:
        return self.bounds[-1]

    @property
    def sizes(self) -> list[int]:
        return [hi - lo for lo, hi in zip(self.bounds, self.bounds[1:], strict=False)]

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.narrow(self.dim, self.bounds[rank], self.sizes[rank])


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SharedScratch) -> Tensor:
        ctx.group = group
        group.note(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.sum(gradient), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SharedScratch) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SharedScratch, split: Split) -> Tensor:
        ctx.group, ctx.split = group, split
        return group.gather(x, split.dim, split.sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.split.part(gradient, ctx.group.rank), None, None


class Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SharedScratch, split: Split) -> Tensor:
        ctx.group, ctx.split = group, split
        group.note(x)
        return split.part(x, group.rank).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.gather(gradient, ctx.split.dim, ctx.split.sizes), None, None


class Crossing(nn.Module):
    """Enter, Gather or Scatter as a module; it passes on what is no tensor."""

    def __init__(
        self, operation: type[Function], group: SharedScratch, split: Split | None = None
    ) -> None:
        super().__init__()
        self._operation = operation
        self._given = (group,) if split is None else (group, split)

    def forward(self, x: Any) -> Any:
        return self._operation.apply(x, *self._given) if isinstance(x, Tensor) else x  # type: ignore[no-untyped-call]


def sum_of_parts(x: Tensor, group: SharedScratch) -> Any:
    """The sum of all processes' parts."""
    return _Sum.apply(x, group)  # type: ignore[no-untyped-call]
