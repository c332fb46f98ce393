"""Where the pieces of one server lie in its flat tensors: one after the other.

A gradient may also come with the pieces that were not used left out; then the others move up.

    all pieces        [ 0 0 0 | 1 1 | 2 2 2 2 ]
    just the used     [ 0 0 0 | 2 2 2 2 ]            used = [True, False, True]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from stratagem.errors import UsageError


class Run(NamedTuple):
    """Neighbouring pieces to be treated alike: lo..hi here, from `at` on in what was given."""

    lo: int
    hi: int
    at: int
    alike: bool


class Layout:
    """Shapes, sizes and places of pieces."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = list(shapes)
        self.sizes = [math.prod(shape) for shape in shapes]
        self.starts = list(accumulate(self.sizes, initial=0))
        self.count = self.starts.pop()
        self._strides = [
            tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))) for shape in shapes
        ]

    def flags(self, used: Sequence[bool] | None) -> list[bool]:
        """Which pieces are used; all of them if nothing is said."""
        if used is None:
            return [True] * len(self.sizes)
        if len(used) != len(self.sizes):
            raise UsageError(f"{len(used)} flags for {len(self.sizes)} pieces of a gradient.")
        return [bool(flag) for flag in used]

    def places(self, grad: Tensor, flags: Sequence[bool]) -> list[int]:
        """Where each piece begins in `grad`, which holds all pieces or just the used ones."""
        sizes = [size if flag else 0 for size, flag in zip(self.sizes, flags, strict=True)]
        few = sum(sizes)
        if grad.dim() != 1 or not grad.is_floating_point() or grad.numel() not in (self.count, few):
            raise UsageError(
                f"a gradient of shape {tuple(grad.shape)}, {grad.dtype}, came for pieces of "
                f"{self.count} elements, {few} of them used: it must be flat and floating point."
            )
        if grad.numel() == self.count:
            return self.starts
        return list(accumulate(sizes, initial=0))[:-1]

    def view(self, flat: Tensor, piece: int, at: int) -> Tensor:
        """The piece in a contiguous flat tensor; a single call, since there may be hundreds."""
        return flat.as_strided(
            self.shapes[piece], self._strides[piece], flat.storage_offset() + at
        )

    def views(self, flat: Tensor) -> list[Tensor]:
        return [self.view(flat, i, start) for i, start in enumerate(self.starts)]

    def runs(
        self, flags: Sequence[bool], places: Sequence[int], alike: Sequence[bool]
    ) -> Iterator[Run]:
        """The flagged pieces, neighbours together as long as they are alike."""
        lo = hi = at = -1
        kind = False
        for start, size, flag, place, this in zip(
            self.starts, self.sizes, flags, places, alike, strict=True
        ):
            if not flag:
                continue
            if start != hi or this is not kind:
                if hi > lo:
                    yield Run(lo, hi, at, kind)
                lo, at, kind = start, place, this
            hi = start + size
        if hi > lo:
            yield Run(lo, hi, at, kind)
