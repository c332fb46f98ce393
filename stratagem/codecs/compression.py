"""Lossy compressions of gradients: fewer bytes, at the price of exactness.

    sg.MirroredStrategy(wire=sg.Int8())                 a quarter of the bytes
    sg.MirroredStrategy(wire=sg.TopK(0.01, momentum=0.9, dense_steps=500))

What a compression leaves out of a gradient is added to the next one (error feedback).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from stratagem.errors import UsageError

#: below this many numbers the overhead of torch's calls dominates; numpy's is smaller
_SMALL = 1 << 14


@dataclass(frozen=True, kw_only=True, repr=False)
class Compression:
    """Base class of the compressions; the first `dense_steps` steps send every number."""

    dense_steps: int = 0
    #: whether it needs an optimizer that is linear in the gradient, which Adam is not
    only_linear: ClassVar[bool] = False

    def __repr__(self) -> str:
        """Show the fields that differ from their defaults."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if not self._is_default(f)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in chosen)})"

    def _is_default(self, field: Field[Any]) -> bool:
        return bool(getattr(self, field.name) == field.default)

    def __post_init__(self) -> None:
        if self.dense_steps < 0:
            raise UsageError(f"{self!r}: dense_steps is a number of steps, 0 or more.")


class SliceCodec(Protocol):
    """A compression that encodes any slice of a flat gradient by itself.

    `lengths` says how many numbers of each parameter the slice holds, in order.
    """

    def room(self, lengths: Sequence[int], itemsize: int) -> int:
        """Return the size of an encoded slice in bytes."""

    def take(self, values: Tensor, lengths: Sequence[int], into: Tensor) -> Tensor | None:
        """Encode `values` into the bytes `into`, and leave the residual in `values`.

        Returns the indices of the numbers that were sent exactly, if the codec selects some.
        """

    def add(self, wire: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        """Decode a slice and add it to `into`."""

    def take_few(
        self, values: np.ndarray, lengths: Sequence[int], into: np.ndarray
    ) -> np.ndarray | None:
        """`take` for small slices on the CPU: the same bits with less overhead."""

    def add_few(self, wire: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        """`add` for small slices on the CPU."""


def is_small(flat: Tensor) -> bool:
    """Whether `take_few` and `add_few` are the faster calls for a slice."""
    return len(flat) < _SMALL and not flat.is_cuda and flat.dtype in (torch.float32, torch.float64)
