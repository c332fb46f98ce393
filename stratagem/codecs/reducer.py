"""Reducers: all-reduce flat gradients, encoded or not."""

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
    """Sums flat gradients over the replicas, each with its own weight."""

    #: whether only gradients may go through it
    lossy: bool
    #: whether it reduces all gradients at the end of backward, and none before
    whole: bool = False
    #: whether it has error feedback: a later gradient carries what one leaves out
    feeds_back: bool = False
    #: whether gradients enter a momentum, so that none may be reduced twice
    moves: bool = False

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def lay_out(self, flat: Tensor, layout: Layout) -> None:
        """Learn which parameters lie in a buffer."""
        return

    def reduce(self, flat: Tensor, weight: float) -> Pending: ...

    def end_step(self) -> None:
        """End the step: all its buffers are reduced."""
        return

    def state(self) -> dict[str, Any]:
        """Copy what this replica carries from step to step, by parameter."""
        return {}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the states of all replicas; there may have been more or fewer than now."""
        return


class Plain(Reducer):
    """All-reduces gradients as they are."""

    lossy = False

    def __init__(self, collective: Collective) -> None:
        self.collective = collective

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.collective.buffer(count, dtype, device)

    def reduce(self, flat: Tensor, weight: float) -> Pending:
        return self.collective.all_reduce(flat, weight)


class Encoded(Reducer):
    """Casts gradients to 16 bits, and sums them in fp32: half the bytes.

    The weight is applied before rounding.
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
