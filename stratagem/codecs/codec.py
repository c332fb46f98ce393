"""An encoding: how the numbers of a gradient, or of parameters, travel.

    wire = codec.encode(gradient)                 one end
    codec.decode_add(wire, total, factor)         the other end

All-reduces (reducer.py) and parameter servers use the same codecs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from stratagem.errors import UsageError


class Codec(Protocol):
    """Encodes tensors into memory of its own; one object for all tensors of a training.

    `name` says which parameter is encoded, for a codec that keeps what it has left out and adds it
    the next time.
    """

    #: whether other numbers may come out than went in
    lossy: bool
    #: bytes that one number takes on its way
    itemsize: int

    def room(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Take memory for as many encoded numbers."""

    def encode(
        self, values: Tensor, into: Tensor | None = None, *, name: str = "", copy: bool = True
    ) -> Tensor:
        """Encode numbers, which autograd does not follow, into this memory or some of the CPU.

        Without `copy` that may be the memory of `values`, where nothing is to be encoded.
        """

    def decode(self, wire: Tensor, into: Tensor) -> None:
        """Write what was encoded."""

    def decode_add(self, wire: Tensor, into: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times what was encoded."""


class CastCodec:
    """Every number for itself, as a number of this type: rounded, or as it is."""

    def __init__(self, dtype: torch.dtype, lossy: bool = True) -> None:
        self.dtype, self.lossy, self.itemsize = dtype, lossy, dtype.itemsize

    def room(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=device)

    def encode(
        self, values: Tensor, into: Tensor | None = None, *, name: str = "", copy: bool = True
    ) -> Tensor:
        if into is None:
            return values.detach().to("cpu", self.dtype, copy=copy).contiguous()
        # a copy from a GPU into pinned memory goes on beside the computation
        return into.copy_(values, non_blocking=True)

    def decode(self, wire: Tensor, into: Tensor) -> None:
        into.copy_(wire)

    def decode_add(self, wire: Tensor, into: Tensor, factor: float = 1.0) -> None:
        into.add_(wire, alpha=factor)


#: for numbers that do not travel, of whatever type
PLAIN = CastCodec(torch.float32, lossy=False)

_WIRE = {None: None, "float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def wire_type(wire: str | None) -> torch.dtype | None:
    """The type behind `wire`: "float32" (or None), "bfloat16" or "float16"."""
    if not isinstance(wire, str | None) or wire not in _WIRE:
        known = ", ".join(repr(name) for name in _WIRE if name)
        raise UsageError(
            f"wire={wire!r} is not known; choose one of {known}, or a record such as sg.Int8(): "
            'wire="bfloat16".'
        )
    return _WIRE[wire]


def codec_for(wire: str | None, dtype: torch.dtype) -> Codec:
    """The codec for numbers of type `dtype` that travel as `wire`."""
    rounded = wire_type(wire)
    return CastCodec(rounded or dtype, lossy=rounded not in (None, dtype))
