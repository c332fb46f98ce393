"""The codec interface: how the numbers of a gradient, or of parameters, are encoded to travel.

    wire = codec.encode(gradient)                 the sender
    codec.decode_add(wire, total, factor)         the receiver

All-reduces (reducer.py) and parameter servers use the same codecs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from stratagem.errors import UsageError


class Codec(Protocol):
    """Encodes and decodes the tensors of a training."""

    #: whether decoding may return other numbers than were encoded
    lossy: bool
    #: bytes of one encoded number
    itemsize: int

    def room(self, shape: Sequence[int]) -> Tensor:
        """Allocate CPU memory for the encoded numbers of a tensor of this shape."""

    def encode(self, values: Tensor, into: Tensor | None = None, *, copy: bool = True) -> Tensor:
        """Encode `values`, detached, into `into` or else into new CPU memory.

        Without `copy`, a codec that changes nothing may return the memory of `values`.
        """

    def decode(self, wire: Tensor, into: Tensor) -> None:
        """Write the decoded numbers to `into`."""

    def decode_add(self, wire: Tensor, into: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times the decoded numbers to `into`."""


class CastCodec:
    """Casts every number to one type, rounded if that type is narrower."""

    def __init__(self, dtype: torch.dtype, lossy: bool = True) -> None:
        self.dtype, self.lossy, self.itemsize = dtype, lossy, dtype.itemsize

    def room(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype)

    def encode(self, values: Tensor, into: Tensor | None = None, *, copy: bool = True) -> Tensor:
        if into is None:
            return values.detach().to("cpu", self.dtype, copy=copy).contiguous()
        # a copy from a GPU into pinned memory goes on beside the computation
        return into.copy_(values, non_blocking=True)

    def decode(self, wire: Tensor, into: Tensor) -> None:
        into.copy_(wire)

    def decode_add(self, wire: Tensor, into: Tensor, factor: float = 1.0) -> None:
        into.add_(wire, alpha=factor)


#: for tensors of any type that stay in this process
PLAIN = CastCodec(torch.float32, lossy=False)

_WIRE = {None: None, "float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def wire_type(wire: str | None) -> torch.dtype | None:
    """Return the type that `wire` names, or None for "float32" and None: no rounding."""
    if not isinstance(wire, str | None) or wire not in _WIRE:
        known = ", ".join(repr(name) for name in _WIRE if name)
        raise UsageError(
            f"wire={wire!r} is not known; choose one of {known}, or a record such as sg.Int8(): "
            'wire="bfloat16".'
        )
    return _WIRE[wire]


def codec_for(wire: str | None, dtype: torch.dtype) -> Codec:
    """Return the codec for tensors of type `dtype` that travel as `wire`."""
    rounded = wire_type(wire)
    return CastCodec(rounded or dtype, lossy=rounded not in (None, dtype))
