"""What crosses between processes that divide layers: four operations, each with its backward.

    operation   forward                          backward
    Enter       whole, as it is                  the sum of everybody's gradient
    Sum         the sum of everybody's part      whole, as it is
    Gather      parts put together               this process' part of the gradient
    Scatter     this process' part               parts of the gradient put together

A value that is whole is alike on all processes, and so is its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from stratagem.wire.shared_scratch import SharedScratch


@dataclass(frozen=True)
class Split:
    """A value of which each process has a part: along an axis, at these bounds."""

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


class _Enter(Function):
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


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SharedScratch, split: Split) -> Tensor:
        ctx.group, ctx.split = group, split
        return group.gather(x, split.dim, split.sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.split.part(gradient, ctx.group.rank), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SharedScratch, split: Split) -> Tensor:
        ctx.group, ctx.split = group, split
        group.note(x)
        return split.part(x, group.rank).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.gather(gradient, ctx.split.dim, ctx.split.sizes), None, None


class Enter(nn.Module):
    """A whole value on its way into a divided layer."""

    def __init__(self, group: SharedScratch) -> None:
        super().__init__()
        self._group = group

    def forward(self, x: Any) -> Any:
        return _Enter.apply(x, self._group) if isinstance(x, Tensor) else x  # type: ignore[no-untyped-call]


class Gather(nn.Module):
    """The whole of a divided value."""

    def __init__(self, group: SharedScratch, split: Split) -> None:
        super().__init__()
        self._group, self._split = group, split

    def forward(self, x: Tensor) -> Any:
        return _Gather.apply(x, self._group, self._split)  # type: ignore[no-untyped-call]


class Scatter(nn.Module):
    """This process' part of a whole value."""

    def __init__(self, group: SharedScratch, split: Split) -> None:
        super().__init__()
        self._group, self._split = group, split

    def forward(self, x: Tensor) -> Any:
        return _Scatter.apply(x, self._group, self._split)  # type: ignore[no-untyped-call]


def sum_of_parts(x: Tensor, group: SharedScratch) -> Any:
    """What everybody's part adds up to."""
    return _Sum.apply(x, group)  # type: ignore[no-untyped-call]
