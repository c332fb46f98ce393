"""A compression: what travels instead of a gradient, where fewer bytes are worth other numbers.

    sg.MirroredStrategy(wire=sg.Int8())                 a quarter of the bytes
    sg.MirroredStrategy(wire=sg.TopK(0.01, momentum=0.9, dense_steps=500))

Whatever is left out is kept, and added to the next gradient (error feedback): late, but not lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from stratagem.errors import UsageError

#: numbers of which torch's calls take longer than what they do; numpy's are shorter
_SMALL = 1 << 14


@dataclass(frozen=True, kw_only=True, repr=False)
class Compression:
    """What all compressions have; `dense_steps`: how many first steps send every number."""

    dense_steps: int = 0
    #: whether an optimizer that is not linear in the gradient (Adam) goes astray with it
    only_linear: ClassVar[bool] = False

    def __repr__(self) -> str:
        """As somebody would write it: without what is as usual."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if not self._usual(f)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in chosen)})"

    def _usual(self, field: Field[Any]) -> bool:
        return bool(getattr(self, field.name) == field.default)

    def __post_init__(self) -> None:
        if self.dense_steps < 0:
            raise UsageError(f"{self!r}: dense_steps is a number of steps, 0 or more.")


class SliceCodec(Protocol):
    """A compression that takes any part of a gradient for itself.

    `lengths` are how many numbers of each parameter lie in the part, one parameter after another.
    """

    def room(self, lengths: Sequence[int], itemsize: int) -> int:
        """Return the bytes that such a part takes."""

    def take(self, values: Tensor, lengths: Sequence[int], into: Tensor) -> Tensor | None:
        """Encode `values` into these bytes, and leave in `values` what was left out.

        Returns the places that were taken whole, where only some are.
        """

    def add(self, wire: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        """Add what was encoded."""

    def take_few(
        self, values: np.ndarray, lengths: Sequence[int], into: np.ndarray
    ) -> np.ndarray | None:
        """`take` of few numbers in the CPU's memory, to the same bits by shorter calls."""

    def add_few(self, wire: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        """`add` of few numbers."""


def is_small(flat: Tensor) -> bool:
    """Whether these are so few that a codec's calls for few are to encode them."""
    return len(flat) < _SMALL and not flat.is_cuda and flat.dtype in (torch.float32, torch.float64)
