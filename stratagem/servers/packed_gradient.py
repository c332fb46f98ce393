"""A compressed gradient as it comes to a server: bytes, until they are numbers again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.compression import Compression
from stratagem.codecs.int8 import Int8
from stratagem.codecs.pushed import decode_piece, row_bytes
from stratagem.errors import UsageError
from stratagem.servers.outbox import encoded_sizes, piece_shapes
from stratagem.servers.training_plan import TrainingPlan


def check_pieces(pieces: Any, count: int, who: str) -> list[int]:
    """The pieces that a header announces: numbers below `count`, each larger than the last."""
    if (
        not isinstance(pieces, list)
        or any(type(n) is not int or not 0 <= n < count for n in pieces)
        or any(a >= b for a, b in pairwise(pieces))
    ):
        raise UsageError(
            f"{who} announces pieces that there are not, or twice, or not in their order; install "
            "the same stratagem on every task."
        )
    return pieces


class PackedGradient:
    """Memory for one worker's bytes; what each piece takes is known before any come."""

    def __init__(
        self,
        record: Compression,
        shapes: Sequence[tuple[int, ...]],
        sizes: Sequence[int],
        itemsize: int,
    ) -> None:
        self._record, self._shapes, self._sizes = record, shapes, sizes
        self._itemsize = itemsize
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._coming: list[int] = []

    def room(self, pieces: Any, left: int, who: str) -> Tensor:
        """Where the bytes of these pieces go, of all if nothing is said; they must be `left`."""
        known = list(range(len(self._sizes)))
        coming = known if pieces is None else check_pieces(pieces, len(known), who)
        size = sum(self._sizes[n] for n in coming)
        if size != left:
            raise UsageError(
                f"{who} sends {left} bytes of a gradient where {size} belong; install the same "
                "stratagem on every task."
            )
        self._coming = coming
        if size > len(self._bytes):
            self._bytes = torch.empty(sum(self._sizes), dtype=torch.uint8)
        return self._bytes[:size]

    def decode(self, into: Tensor, who: str) -> int:
        """Write the numbers of what has come, one piece after another; returns how many."""
        at = start = 0
        for piece in self._coming:
            shape, size = self._shapes[piece], self._sizes[piece]
            count = torch.Size(shape).numel()
            try:
                wire = self._bytes[start : start + size]
                decode_piece(self._record, wire, shape, into[at : at + count])
            except ValueError as problem:
                raise UsageError(f"{who}: {problem}") from problem
            at, start = at + count, start + size
        return at

    def row_bytes(self, count: int) -> int | None:
        """Bytes of so many numbers in rows; None: they come as they are."""
        if not isinstance(self._record, Int8):
            return None
        return row_bytes(self._record, count, self._itemsize)

    def rows(self, wire: Tensor, view: Tensor, count: int) -> Tensor:
        """The numbers of so many rows of a piece."""
        if not isinstance(self._record, Int8):
            return wire
        values = torch.zeros(count * view[:1].numel(), dtype=view.dtype)
        self._record.add(wire, [len(values)], values)
        return values.view(count, *view.shape[1:])


def packed_gradient(plan: TrainingPlan, server: int) -> PackedGradient | None:
    """Memory for what one worker sends to this server, where gradients are compressed."""
    record = plan.compression
    if record is None:
        return None
    sizes = encoded_sizes(plan, record)[server]
    return PackedGradient(record, piece_shapes(plan)[server], sizes, plan.dtype.itemsize)
