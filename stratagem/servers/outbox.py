"""A worker's outgoing gradients, and compressed gradients as a server reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.codec import Codec, codec_for
from stratagem.codecs.compression import Compression
from stratagem.codecs.int8 import Int8
from stratagem.codecs.pushed import PushFeedback, decode_piece, piece_bytes, row_bytes
from stratagem.codecs.topk import TopK
from stratagem.errors import NotDistributable, UsageError
from stratagem.rules.updates import Synchronous
from stratagem.servers.training_plan import TrainingPlan


class Outbox:
    """A gradient that is not compressed: every number, perhaps rounded."""

    def __init__(self, plan: TrainingPlan, codec: Codec, flat: Tensor) -> None:
        """`flat`: memory for all parts, which servers of this machine read."""
        self.plan, self.codec = plan, codec
        layout = plan.layout
        #: the part of each server
        self.plain = [
            flat[layout.offset(i) : layout.offset(i) + load] for i, load in enumerate(layout.loads)
        ]
        #: by server: the pieces, as views of its part
        self.slots: list[list[Tensor]] = []
        for part, extents in zip(self.plain, layout.extents, strict=True):
            at = 0
            self.slots.append([])
            for e in extents:
                self.slots[-1].append(part[at : at + e.hi - e.lo])
                at += e.hi - e.lo

    #: whether the header must name the pieces that are sent
    numbered = False

    def take(self, variable: int, flat: Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        """Encode a variable's gradient into these pieces (server, number)."""
        for server, number in pieces:
            target, e = self.slots[server][number], self.plan.layout.extents[server][number]
            if target.data_ptr() != flat.data_ptr():  # else it was made there
                self.codec.encode(flat[e.start : e.start + e.hi - e.lo], target)

    def rows(self, variable: int, first: int, numbers: Tensor, values: Tensor) -> Tensor:
        """Encode rows of a sparse gradient, in the piece that begins with row `first`."""
        return self.plan.codec.encode(values, copy=False)

    def part(self, server: int) -> Tensor:
        """Return the server's encoded part of the gradient."""
        return self.plain[server]

    def sizes(self, server: int) -> list[int]:
        """Return the length of each piece in the server's part."""
        return [e.hi - e.lo for e in self.plan.layout.extents[server]]

    def header(self) -> dict[str, Any]:
        """Return what servers need to read the gradient."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of a gradient."""
        return sum(self.part(server).nbytes for server in range(len(self.plain)))

    def settle(self, *, counted: bool) -> None:
        """End a push."""

    def state(self) -> dict[str, Any]:
        """Copy the state that is kept between pushes."""
        return {}

    def load(self, states: Sequence[Any], index: int) -> None:
        """Go on, as worker `index`, from the states of all workers."""


class CompressedOutbox(Outbox):
    """Compresses each piece of a gradient, and keeps the residual.

    Servers of this machine read decoded numbers from shared memory.
    """

    def __init__(
        self, plan: TrainingPlan, flat: Tensor, feedback: PushFeedback, *, near: bool
    ) -> None:
        super().__init__(plan, codec_for(None, plan.dtype), flat)
        self.feedback, self._near, self._record = feedback, near, feedback.record
        self._shapes = piece_shapes(plan)
        self._sizes = encoded_sizes(plan, self._record)
        self._bytes = [torch.zeros(sum(sizes), dtype=torch.uint8) for sizes in self._sizes]
        self._starts = [list(accumulate(sizes, initial=0)) for sizes in self._sizes]

    @property
    def numbered(self) -> bool:  # type: ignore[override]
        return not self.feedback.dense

    def take(self, variable: int, flat: Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        self.feedback.charge(variable, flat)
        for server, number in pieces:
            e, into = self.plan.layout.extents[server][number], self.slots[server][number]
            if self.feedback.dense:
                into.copy_(self.feedback.dense_piece(variable, e.start, e.start + len(into)))
                continue
            at, shape = self._starts[server], self._shapes[server][number]
            wire = self._bytes[server][at[number] : at[number + 1]]
            self.feedback.encode(variable, e.start, shape, wire)
            if self._near:
                decode_piece(self._record, wire, shape, into)

    def rows(self, variable: int, first: int, numbers: Tensor, values: Tensor) -> Tensor:
        """Encode rows in eight bits for `Int8`; other compressions send them as they are."""
        if isinstance(self._record, TopK) and self._record.momentum:
            raise NotDistributable(
                f"wire={self._record!r} keeps a momentum, which rows of a sparse gradient would "
                "not get; use sparse=False, or TopK without momentum and the optimizer's own."
            )
        if self.feedback.dense or not isinstance(self._record, Int8):
            return super().rows(variable, first, numbers, values)
        return self.feedback.encode_rows(variable, first, numbers, values)

    def part(self, server: int) -> Tensor:
        return super().part(server) if self.feedback.dense else self._bytes[server]

    def sizes(self, server: int) -> list[int]:
        return super().sizes(server) if self.feedback.dense else self._sizes[server]

    def header(self) -> dict[str, Any]:
        return {"dense": True} if self.feedback.dense else {}

    def settle(self, *, counted: bool) -> None:
        self.feedback.settle(counted=counted)

    def state(self) -> dict[str, Any]:
        return self.feedback.state()

    def load(self, states: Sequence[Any], index: int) -> None:
        mean = isinstance(self.plan.updates, Synchronous)
        self.feedback.load(states, index, self.plan.workers, mean)


def piece_shapes(plan: TrainingPlan) -> list[list[tuple[int, ...]]]:
    """Return the shapes of each server's pieces."""
    return [
        [e.piece.shape(plan.shapes[e.piece.variable]) for e in extents]
        for extents in plan.layout.extents
    ]


def encoded_sizes(plan: TrainingPlan, record: Compression) -> list[list[int]]:
    """Return the compressed bytes of each server's pieces."""
    size = plan.dtype.itemsize
    return [[piece_bytes(record, shape, size) for shape in part] for part in piece_shapes(plan)]


def check_pieces(pieces: Any, count: int, who: str) -> list[int]:
    """Check the pieces that a header announces: increasing numbers below `count`."""
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
    """A server's memory for one worker's compressed gradient."""

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
        """Return memory for the bytes of these pieces (None: all), which must be `left`."""
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
        """Decode the pieces that have come, one after another; return the count of numbers."""
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
        """Return the bytes of so many compressed numbers in rows; None: rows are not compressed."""
        if not isinstance(self._record, Int8):
            return None
        return row_bytes(self._record, count, self._itemsize)

    def rows(self, wire: Tensor, view: Tensor, count: int) -> Tensor:
        """Decode `count` rows of a piece."""
        if not isinstance(self._record, Int8):
            return wire
        values = torch.zeros(count * view[:1].numel(), dtype=view.dtype)
        self._record.add(wire, [len(values)], values)
        return values.view(count, *view.shape[1:])


def packed_gradient(plan: TrainingPlan, server: int) -> PackedGradient | None:
    """Return memory for a worker's compressed gradient; None without compression."""
    record = plan.compression
    if record is None:
        return None
    sizes = encoded_sizes(plan, record)[server]
    return PackedGradient(record, piece_shapes(plan)[server], sizes, plan.dtype.itemsize)
