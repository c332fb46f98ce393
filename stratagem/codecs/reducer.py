"""How a flat gradient is encoded on its way through the all-reduce."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stratagem.errors import NotDistributable, UsageError
from stratagem.wire.collective import Collective, Pending, apply_weight


class Reducer(Protocol):
    """Adds up flat gradients over the replicas, each with its own weight."""

    #: whether numbers other than gradients must keep away from it
    lossy: bool

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def reduce(self, flat: Tensor, weight: float) -> Pending: ...


class Plain:
    """Every bit travels."""

    lossy = False

    def __init__(self, collective: Collective) -> None:
        self.collective = collective

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.collective.buffer(count, dtype, device)

    def reduce(self, flat: Tensor, weight: float) -> Pending:
        return self.collective.all_reduce(flat, weight)


class Cast:
    """Rounded to sixteen bits for the journey, added up in fp32: half the bytes.

    Weighted before rounding, so that the sum is of numbers that everybody rounded alike.
    """

    lossy = True

    def __init__(self, collective: Collective, dtype: torch.dtype) -> None:
        self.collective = collective
        self.dtype = dtype
        self._rooms: dict[tuple[int, int], Tensor] = {}

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype.is_complex:
            raise NotDistributable(
                f"wire of {self.dtype} cannot carry gradients of complex "
                "parameters; leave it out."
            )
        flat = torch.zeros(count, dtype=dtype, device=device)
        room = self.collective.buffer(count, self.dtype, device)
        self._rooms[flat.data_ptr(), count] = room
        return flat

    def reduce(self, flat: Tensor, weight: float) -> Pending:
        apply_weight(flat, weight)
        room = self._rooms[flat.data_ptr(), flat.numel()]
        room.copy_(flat)
        pending = self.collective.all_reduce(room)

        def finish() -> None:
            pending.wait()
            flat.copy_(room)

        return Pending(finish)


_WIRE = {None: None, "float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def wire_type(wire: str | None) -> torch.dtype | None:
    """The type behind `wire`: "float32" (or None), "bfloat16" or "float16"."""
    if wire not in _WIRE:
        known = ", ".join(repr(name) for name in _WIRE if name)
        raise UsageError(f'wire={wire!r} is not known; choose one of {known}: wire="bfloat16".')
    return _WIRE[wire]


def reducer(collective: Collective, wire: str | None) -> Reducer:
    """The reducer whose gradients travel as `wire`."""
    dtype = wire_type(wire)
    return Plain(collective) if dtype is None else Cast(collective, dtype)
