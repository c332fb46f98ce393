"""Gradients added up until the next update.

Dense gradients meet in one flat block of memory, in float32 at least whatever they came in. Which
pieces have something in them is kept beside it: the first gradient of a piece is written, not
added, so that nothing is ever filled with zeros. Sparse gradients wait as rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.state.layout import Layout

_CHUNK, _ROW = 1 << 16, 1 << 10
#: pieces of so few elements are copied in the time that a view of one takes to make
_SMALL = 1 << 13


class GradientSum:
    """The sum of weighted gradients of one server's pieces."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.dtype = torch.float64 if dtype is torch.float64 else torch.float32
        self._memory: tuple[Tensor, list[Tensor]] | None = None
        self.clear()

    def clear(self) -> None:
        self._filled = [False] * len(self.layout.sizes)
        self._rows: dict[int, list[Tensor]] = {}

    @property
    def flat(self) -> Tensor:
        return self._touch()[0]

    @property
    def views(self) -> list[Tensor]:
        return self._touch()[1]

    def _touch(self) -> tuple[Tensor, list[Tensor]]:
        """The memory, taken when first needed: one push at a time never needs it."""
        if self._memory is None:
            flat = torch.empty(self.layout.count, dtype=self.dtype, device=self.device)
            self._memory = flat, self.layout.views(flat)
        return self._memory

    # --- adding -----------------------------------------------------------------------------

    def add(self, grad: Tensor, factor: float, used: Sequence[bool] | None = None) -> None:
        flags = self.layout.flags(used)
        places = self.layout.places(grad, flags)
        for lo, hi, at, filled in self.layout.runs(flags, places, self._filled):
            given, into = grad[at : at + hi - lo].to(self.device), self.flat[lo:hi]
            if filled:
                into.add_(given, alpha=factor)
            elif factor != 1.0 and given.dtype is self.dtype:
                torch.mul(given, factor, out=into)
            else:
                _scale(into.copy_(given), factor, None)
        self._filled = [a or b for a, b in zip(self._filled, flags, strict=True)]

    def add_rows(self, piece: int, rows: Tensor, values: Tensor, factor: float) -> None:
        shape = self.layout.shapes[piece]
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
        rows = rows.to(device=self.device, copy=True)
        self._rows.setdefault(piece, []).append(self._sparse(piece, rows, values))

    def _sparse(self, piece: int, rows: Tensor, values: Tensor) -> Tensor:
        shape = self.layout.shapes[piece]
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, check_invariants=False)

    # --- what waits ---------------------------------------------------------------------------

    def norm_squared(self, scale: float) -> float:
        """Of the sum times `scale`."""
        self._merge()
        dense = [square_sum(self.flat[lo:hi]) for lo, hi in self._spans()]
        rows = [square_sum(self._coalesced(i).values().flatten()) for i in self._rows]
        return math.fsum(dense + rows) * scale * scale

    def take(self, scale: float, clip_value: float | None) -> list[Tensor | None]:
        """The sum times `scale`, clipped, by piece, and nothing waits any more.

        Dense ones are views of the sum's memory: use them before the next `add`.
        """
        self._merge()
        for lo, hi in self._spans():
            _scale(self.flat[lo:hi], scale, clip_value)
        grads = [self.views[i] if filled else None for i, filled in enumerate(self._filled)]
        for i in self._rows:
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
        flags = self.layout.flags(used)
        places = self.layout.places(grad, flags)
        fit = grad.dtype is self.dtype and grad.device == self.device and grad.is_contiguous()
        small = self.layout.count < _SMALL * len(flags)
        if small or not fit or any(flags[i] for i in self._rows):
            self.add(grad, factor, used)
            return self.take(1.0, clip_value)
        for lo, hi, at, _ in self.layout.runs(flags, places, flags):
            _scale(grad[at : at + hi - lo], factor, clip_value)
        grads = self.take(1.0, clip_value)
        for i, flag in enumerate(flags):
            if flag:
                grads[i] = self.layout.view(grad, i, places[i])
        return grads

    def _merge(self) -> None:
        """Rows of a piece that has a dense gradient, too, are added to that."""
        for i in [i for i in self._rows if self._filled[i]]:
            rows = self._coalesced(i)
            self.views[i].index_add_(0, rows.indices()[0], rows.values())
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
        runs = self.layout.runs(self._filled, self.layout.starts, self._filled)
        return [(run.lo, run.hi) for run in runs]


def square_sum(flat: Tensor) -> float:
    """The sum of squares of a flat tensor: of short rows as they are, of all rows in float64."""
    even = flat.numel() - flat.numel() % _ROW
    rows = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1).double()
    rest = flat[even:].double()
    return float(rows.dot(rows)) + float(rest.dot(rest))


def distance_squared(a: Tensor, b: Tensor) -> float:
    """The squared distance of two flat tensors, without a copy of all of them."""
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    return math.fsum(
        square_sum(x.to(wide) - y.to(x.device, wide))
        for x, y in zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True)
    )


def _scale(tensor: Tensor, scale: float, clip_value: float | None) -> None:
    if scale != 1.0:
        tensor.mul_(scale)
    if clip_value is not None:
        tensor.clamp_(-clip_value, clip_value)
