"""Gradients added up until the next update.

Dense gradients meet in one flat block of memory, in float32 at least whatever they came in. Which
pieces have something in them is kept beside it: the first gradient of a piece is written, not
added, so that nothing is ever filled with zeros. Sparse gradients wait as rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.errors import UsageError

_CHUNK = 1 << 16


class Run(NamedTuple):
    """Neighbouring pieces that are treated alike: lo..hi here, from `at` on in what was given."""

    lo: int
    hi: int
    at: int
    fresh: bool


class GradientSum:
    """The sum of weighted gradients of one server's pieces."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = list(shapes)
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.starts = list(accumulate(self.sizes, initial=0))
        self.count = self.starts.pop()
        self.dtype = torch.float64 if dtype is torch.float64 else torch.float32
        self.device = device
        self._flat: Tensor | None = None
        self._filled = [False] * len(self.sizes)
        self._rows: dict[int, list[Tensor]] = {}

    # --- adding -----------------------------------------------------------------------------

    def runs(self, grad: Tensor, used: Sequence[bool] | None) -> list[Run]:
        """Where the used pieces lie in `grad`, which holds all pieces or just the used ones."""
        flags = [True] * len(self.sizes) if used is None else list(used)
        if len(flags) != len(self.sizes):
            raise UsageError(f"{len(flags)} flags for {len(self.sizes)} pieces of a gradient.")
        few = sum(size for size, flag in zip(self.sizes, flags, strict=True) if flag)
        if grad.dim() != 1 or not grad.is_floating_point() or grad.numel() not in (self.count, few):
            raise UsageError(
                f"a gradient of shape {tuple(grad.shape)}, {grad.dtype}, came for pieces of "
                f"{self.count} elements, {few} of them used: it must be flat and floating point."
            )
        return list(self._runs(flags, compact=grad.numel() != self.count))

    def _runs(self, flags: Sequence[bool], compact: bool) -> Iterator[Run]:
        run: Run | None = None
        at = 0
        for i, flag in enumerate(flags):
            lo, size = self.starts[i], self.sizes[i]
            if flag:
                fresh, here = not self._filled[i], at if compact else lo
                if run and (run.hi, run.fresh) == (lo, fresh):
                    run = run._replace(hi=lo + size)
                else:
                    if run:
                        yield run
                    run = Run(lo, lo + size, here, fresh)
                at += size
        if run:
            yield run

    def add(self, grad: Tensor, factor: float, used: Sequence[bool] | None = None) -> None:
        runs = self.runs(grad, used)
        flat = self._memory()
        for lo, hi, at, fresh in runs:
            given = grad[at : at + hi - lo].to(self.device)
            if not fresh:
                flat[lo:hi].add_(given, alpha=factor)
            elif factor != 1.0 and given.dtype is self.dtype:
                torch.mul(given, factor, out=flat[lo:hi])
            else:
                flat[lo:hi].copy_(given)
                if factor != 1.0:
                    flat[lo:hi].mul_(factor)
        for i in range(len(self.sizes)):
            self._filled[i] |= used is None or bool(used[i])

    def add_rows(self, piece: int, rows: Tensor, values: Tensor, factor: float) -> None:
        shape = self.shapes[piece]
        if not shape:
            raise UsageError("a scalar has no rows; add its gradient whole.")
        if rows.dtype is not torch.int64 or rows.dim() != 1:
            raise UsageError(f"rows are a flat int64 tensor, not {rows.dtype} of {rows.dim()}-d.")
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= shape[0]):
            raise UsageError(f"rows outside of 0..{shape[0] - 1}, which is all the piece has.")
        if values.numel() != len(rows) * math.prod(shape[1:]) or not values.is_floating_point():
            raise UsageError(
                f"{len(rows)} rows of {tuple(shape[1:])} cannot have values of "
                f"shape {tuple(values.shape)}, {values.dtype}."
            )
        values = values.reshape(len(rows), *shape[1:])
        values = values.to(device=self.device, dtype=self.dtype, copy=True).mul_(factor)
        self._rows.setdefault(piece, []).append(self._sparse(piece, rows.to(self.device), values))

    def _sparse(self, piece: int, rows: Tensor, values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(
            rows.clone().unsqueeze(0), values, self.shapes[piece], check_invariants=False
        )

    # --- what waits ---------------------------------------------------------------------------

    def norm_squared(self, scale: float) -> float:
        """Of the sum times `scale`."""
        self._merge()
        parts = [square_sum(self._memory()[lo:hi]) for lo, hi in self._spans()]
        parts += [square_sum(self._coalesced(i).values().flatten()) for i in self._rows]
        return sum(parts) * scale * scale

    def take(self, scale: float, clip_value: float | None) -> list[Tensor | None]:
        """The sum times `scale`, clipped, by piece, and nothing waits any more.

        Dense ones are views of the sum's memory: use them before the next `add`.
        """
        self._merge()
        grads: list[Tensor | None] = [None] * len(self.sizes)
        for lo, hi in self._spans():
            _scale(self._memory()[lo:hi], scale, clip_value)
        for i, filled in enumerate(self._filled):
            if filled:
                lo = self.starts[i]
                grads[i] = self._memory()[lo : lo + self.sizes[i]].view(self.shapes[i])
            elif i in self._rows:
                grads[i] = rows = self._coalesced(i)
                _scale(rows.values(), scale, clip_value)
        self.clear()
        return grads

    def take_one(
        self, grad: Tensor, factor: float, used: Sequence[bool] | None, clip_value: float | None
    ) -> list[Tensor | None]:
        """`add` and `take` of one gradient, in its own memory if that is of the right kind."""
        if any(self._filled):
            raise UsageError("other gradients wait to be applied; add this one to them.")
        runs = self.runs(grad, used)
        flags = [True] * len(self.sizes) if used is None else used
        alike = grad.dtype is self.dtype and grad.device == self.device and grad.is_contiguous()
        if not alike or any(flags[i] for i in self._rows):
            self.add(grad, factor, used)
            return self.take(1.0, clip_value)
        for lo, hi, at, _ in runs:
            _scale(grad[at : at + hi - lo], factor, clip_value)
        grads = self.take(1.0, clip_value)
        at = 0
        compact = grad.numel() != self.count
        for i, flag in enumerate(flags):
            if flag:
                lo = at if compact else self.starts[i]
                grads[i] = grad[lo : lo + self.sizes[i]].view(self.shapes[i])
                at += self.sizes[i]
        return grads

    def clear(self) -> None:
        self._filled = [False] * len(self.sizes)
        self._rows = {}

    def _merge(self) -> None:
        """Rows of a piece that has a dense gradient, too, are added to that."""
        for i in [i for i in self._rows if self._filled[i]]:
            lo, rows = self.starts[i], self._coalesced(i)
            into = self._memory()[lo : lo + self.sizes[i]].view(self.shapes[i])
            into.index_add_(0, rows.indices()[0], rows.values())
            del self._rows[i]

    def _coalesced(self, piece: int) -> Tensor:
        """The rows that wait, each once."""
        parts = self._rows[piece]
        if len(parts) > 1:
            rows = torch.cat([part._indices()[0] for part in parts])
            parts[:] = [self._sparse(piece, rows, torch.cat([part._values() for part in parts]))]
        if not parts[0].is_coalesced():
            parts[0] = parts[0].coalesce()
        return parts[0]

    def _spans(self) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for start, size, filled in zip(self.starts, self.sizes, self._filled, strict=True):
            if filled and spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + size)
            elif filled:
                spans.append((start, start + size))
        return spans

    def _memory(self) -> Tensor:
        if self._flat is None:
            self._flat = torch.empty(self.count, dtype=self.dtype, device=self.device)
        return self._flat


def square_sum(flat: Tensor) -> float:
    """The sum of squares of a flat tensor, in float64, without a copy of all of it."""
    parts = (part.double() for part in torch.split(flat, _CHUNK))
    return math.fsum(float(part.dot(part)) for part in parts)


def distance_squared(a: Tensor, b: Tensor) -> float:
    """The squared distance of two flat tensors, in float64, without a copy of all of them."""
    return math.fsum(
        square_sum(x.double() - y.to(x.device, torch.float64))
        for x, y in zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True)
    )


def _scale(tensor: Tensor, scale: float, clip_value: float | None) -> None:
    if scale != 1.0:
        tensor.mul_(scale)
    if clip_value is not None:
        tensor.clamp_(-clip_value, clip_value)
