"""The layout of a flat gradient: its parameters, and its slices, one a replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Numbers `start` to `end` of a flat gradient; `lengths` are by parameter, in order."""

    start: int
    end: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters in a flat gradient, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    def slices(self, parts: int) -> list[Slice]:
        """Return slices of nearly equal length."""
        total = sum(self.counts)
        ends = [total * (i + 1) // parts for i in range(parts)]
        found, start = [], 0
        for end in ends:
            found.append(Slice(start, end, tuple(self._lengths(start, end))))
            start = end
        return found

    def _lengths(self, start: int, end: int) -> Iterator[int]:
        at = 0
        for count in self.counts:
            length = min(end, at + count) - max(start, at)
            if length > 0:
                yield length
            at += count

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Copy a flat tensor into one tensor a parameter, by name."""
        parts = torch.split(flat.detach(), self.counts)
        both = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.reshape(shape).cpu().clone() for name, shape, part in both}

    def join(self, parts: dict[str, Tensor], into: Tensor) -> None:
        """Write tensors by name into a flat one; zeros where one is missing or of another shape."""
        into.zero_()
        at = 0
        for name, shape, count in zip(self.names, self.shapes, self.counts, strict=True):
            part = parts.get(name)
            if part is not None and tuple(part.shape) == tuple(shape):
                into[at : at + count].copy_(part.reshape(-1))
            at += count


def layout(names: Sequence[str], tensors: Sequence[Tensor]) -> Layout:
    """Return the layout of these parameters."""
    return Layout(tuple(names), tuple(tuple(t.shape) for t in tensors))
