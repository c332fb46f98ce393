"""The sum of gradients until the next update, and where each piece lies in flat memory.

Dense gradients are added in one flat block of memory, in float32 at least. The first gradient of a
piece is written, not added, so that memory is never filled with zeros. Sparse gradients are kept as
rows.

The pieces of one server lie one after the other. A gradient may leave out the pieces that were not
used; the remaining ones then move up:

    all pieces        [ 0 0 0 | 1 1 | 2 2 2 2 ]
    just the used     [ 0 0 0 | 2 2 2 2 ]            used = [True, False, True]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem.codecs.codec import PLAIN, Codec
from stratagem.errors import UsageError


class PieceRun(NamedTuple):
    """Neighbouring pieces to be treated alike: lo..hi here, from `at` on in the gradient."""

    lo: int
    hi: int
    at: int
    alike: bool


class PieceLayout:
    """Shapes, sizes and offsets of pieces."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = list(shapes)
        self.sizes = [math.prod(shape) for shape in shapes]
        self.starts = list(accumulate(self.sizes, initial=0))
        self.count = self.starts.pop()
        self._strides = [
            tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))) for shape in shapes
        ]

    def flags(self, used: Sequence[bool] | None) -> list[bool]:
        """Return for each piece whether it is used; None means all."""
        if used is None:
            return [True] * len(self.sizes)
        return [bool(flag) for flag in used]

    def places(self, grad: Tensor, flags: Sequence[bool]) -> list[int]:
        """Return where each piece begins in `grad`, which has all pieces or the used ones."""
        sizes = [size if flag else 0 for size, flag in zip(self.sizes, flags, strict=True)]
        few = sum(sizes)
        if grad.numel() not in (self.count, few):  # it may have come from the network
            raise UsageError(
                f"a gradient of shape {tuple(grad.shape)}, {grad.dtype}, came for pieces of "
                f"{self.count} elements, {few} of them used: it must be flat and floating point."
            )
        if grad.numel() == self.count:
            return self.starts
        return list(accumulate(sizes, initial=0))[:-1]

    def view(self, flat: Tensor, piece: int, at: int) -> Tensor:
        """Return a piece of a contiguous flat tensor; one call, as there may be hundreds."""
        return flat.as_strided(self.shapes[piece], self._strides[piece], flat.storage_offset() + at)

    def views(self, flat: Tensor) -> list[Tensor]:
        return [self.view(flat, i, start) for i, start in enumerate(self.starts)]

    def runs(
        self, flags: Sequence[bool], places: Sequence[int], alike: Sequence[bool]
    ) -> Iterator[PieceRun]:
        """Yield runs of flagged neighbouring pieces that are alike."""
        lo = hi = at = -1
        kind = False
        for start, size, flag, place, this in zip(
            self.starts, self.sizes, flags, places, alike, strict=True
        ):
            if not flag:
                continue
            if start != hi or this is not kind:
                if hi > lo:
                    yield PieceRun(lo, hi, at, kind)
                lo, at, kind = start, place, this
            hi = start + size
        if hi > lo:
            yield PieceRun(lo, hi, at, kind)


_CHUNK, _ROW = 1 << 16, 1 << 10
#: pieces with fewer elements are copied as fast as views of them are made
_SMALL = 1 << 13


class GradientSum:
    """The sum of weighted gradients of one server's pieces."""

    def __init__(self, layout: PieceLayout, dtype: torch.dtype, device: torch.device) -> None:
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
        """Allocate the memory when first needed: updates by single pushes never need it."""
        if self._memory is None:
            flat = torch.empty(self.layout.count, dtype=self.dtype, device=self.device)
            self._memory = flat, self.layout.views(flat)
        return self._memory

    # --- adding -----------------------------------------------------------------------------

    def add(
        self,
        grad: Tensor,
        factor: float,
        used: Sequence[bool] | None = None,
        codec: Codec = PLAIN,
    ) -> None:
        flags = self.layout.flags(used)
        places = self.layout.places(grad, flags)
        for lo, hi, at, filled in self.layout.runs(flags, places, self._filled):
            given, into = grad[at : at + hi - lo].to(self.device), self.flat[lo:hi]
            if filled:
                codec.decode_add(given, into, factor)
            elif factor != 1.0 and given.dtype is self.dtype:
                torch.mul(given, factor, out=into)
            else:
                codec.decode(given, into)
                _scale(into, factor, None)
        self._filled = [a or b for a, b in zip(self._filled, flags, strict=True)]

    def add_rows(self, piece: int, rows: Tensor, values: Tensor, factor: float) -> None:
        shape = self.layout.shapes[piece]
        values = values.reshape(len(rows), *shape[1:])
        values = values.to(device=self.device, dtype=self.dtype, copy=True).mul_(factor)
        rows = rows.to(device=self.device, copy=True)
        self._rows.setdefault(piece, []).append(self._sparse(piece, rows, values))

    def _sparse(self, piece: int, rows: Tensor, values: Tensor) -> Tensor:
        shape = self.layout.shapes[piece]
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, check_invariants=False)

    def copy(self) -> list[Any]:
        """Copy the pending sum, as a tree."""
        rows = {
            str(piece): [[part._indices()[0].cpu(), part._values().cpu()] for part in parts]
            for piece, parts in self._rows.items()
        }
        dense = self.flat.clone().cpu() if any(self._filled) else None
        return [dense, list(self._filled), rows]

    def take_over(self, copy: Sequence[Any]) -> None:
        """Continue with a copy of another pending sum."""
        dense, filled, rows = copy
        if dense is not None:
            self.flat.copy_(dense)
        self._filled = list(filled)
        for piece, parts in rows.items():
            for numbers, values in parts:
                self.add_rows(int(piece), numbers, values, 1.0)

    # --- what waits ---------------------------------------------------------------------------

    def norm_squared(self, scale: float) -> float:
        """Return the squared norm of the sum times `scale`."""
        self._merge()
        dense = [square_sum(self.flat[lo:hi]) for lo, hi in self._spans()]
        rows = [square_sum(self._coalesced(i).values().flatten()) for i in self._rows]
        return math.fsum(dense + rows) * scale * scale

    def take(self, scale: float, clip_value: float | None) -> list[Tensor | None]:
        """Return the sum times `scale`, clipped, by piece, and clear it.

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
        """Do `add` and `take` of one gradient, in its own memory if that fits."""
        assert not any(self._filled)  # an update by one push waits for no other
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
        """Add the rows of pieces that have a dense gradient, too, to that."""
        for i in [i for i in self._rows if self._filled[i]]:
            rows = self._coalesced(i)
            self.views[i].index_add_(0, rows.indices()[0], rows.values())
            del self._rows[i]

    def _coalesced(self, piece: int) -> Tensor:
        """Return the pending rows, each once."""
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
    """Return the sum of squares of a flat tensor, with short rows summed in its own type."""
    even = flat.numel() - flat.numel() % _ROW
    rows = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1).double()
    rest = flat[even:].double()
    return float(rows.dot(rows)) + float(rest.dot(rest))


def distance_squared(a: Tensor, b: Tensor) -> float:
    """Return the squared distance of two flat tensors, without full-size copies."""
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
