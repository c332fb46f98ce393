"""A flat gradient's way through the all-reduce, as it is or encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stratagem.codecs.codec import CastCodec
from stratagem.codecs.layout import Layout
from stratagem.errors import NotDistributable
from stratagem.wire.collective import Collective, Pending, apply_weight


class Reducer(Protocol):
    """Adds up flat gradients over the replicas, each with its own weight."""

    #: whether numbers other than gradients must keep away from it
    lossy: bool
    #: whether it wants all gradients of a step at once, none while others are computed
    whole: bool = False
    #: whether what it leaves out of a gradient comes with a later one
    feeds_back: bool = False
    #: whether what it is given becomes part of a momentum, so that it must not come twice
    moves: bool = False

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def lay_out(self, flat: Tensor, layout: Layout) -> None:
        """Hear which parameters lie in a buffer."""
        return

    def reduce(self, flat: Tensor, weight: float) -> Pending: ...

    def end_step(self) -> None:
        """All buffers of a step are reduced."""
        return

    def state(self) -> dict[str, Any]:
        """Copy what this replica keeps from one step to the next, by parameter."""
        return {}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of all replicas, as many as here or others."""
        return


class Plain(Reducer):
    """Every bit travels."""

    lossy = False

    def __init__(self, collective: Collective) -> None:
        self.collective = collective

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.collective.buffer(count, dtype, device)

    def reduce(self, flat: Tensor, weight: float) -> Pending:
        return self.collective.all_reduce(flat, weight)


class Encoded(Reducer):
    """Encoded for the journey, added up in fp32: half the bytes, rounded to sixteen bits.

    Weighted before rounding, so that the sum is of numbers that everybody rounded alike.
    """

    lossy = True

    def __init__(self, collective: Collective, codec: CastCodec) -> None:
        self.collective, self.codec = collective, codec
        self._rooms: dict[tuple[int, int], Tensor] = {}

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype.is_complex:
            raise NotDistributable(
                f"wire of {self.codec.dtype} cannot carry gradients of complex parameters; leave "
                "it out."
            )
        flat = torch.zeros(count, dtype=dtype, device=device)
        room = self.collective.buffer(count, self.codec.dtype, device)
        self._rooms[flat.data_ptr(), count] = room
        return flat

    def reduce(self, flat: Tensor, weight: float) -> Pending:
        apply_weight(flat, weight)
        room = self._rooms[flat.data_ptr(), flat.numel()]
        self.codec.encode(flat, room)
        pending = self.collective.all_reduce(room)

        def finish() -> None:
            pending.wait()
            self.codec.decode(room, flat)

        return Pending(finish)
