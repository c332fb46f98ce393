"""An all-reduce that is compressed both ways: to the replica that sums a slice, and back.

    replica 0  [ slice 0 | slice 1 | slice 2 ]      each sends slice s, compressed, to replica s
    replica 1  [ slice 0 | slice 1 | slice 2 ]      replica s sums them, compresses the sum,
    replica 2  [ slice 0 | slice 1 | slice 2 ]      and sends it to all

Each replica sends (N-1)/N of a compressed gradient twice, for any N. All decode the same bytes,
so all hold the same bits. Both sides have error feedback: each replica has a residual of its
gradient, and one of the sums of its slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.compression import Compression, SliceCodec, is_small
from stratagem.codecs.feedback import Carried, Feedback, Kept, Memory, finite
from stratagem.codecs.layout import Layout, Slice
from stratagem.codecs.topk import TopK
from stratagem.wire.collective import Collective

#: bytes before each slice; the first says whether the sender has a number that is not finite
_HEAD = 8


def width(codec: SliceCodec, slices: Sequence[Slice], itemsize: int) -> int:
    """Return the bytes that every slice is sent as: those of the longest."""
    room = max(codec.room(each.lengths, itemsize) for each in slices)
    return _HEAD + -(-room // 8) * 8


class SliceMemory(Memory):
    """A memory with the residual of the slice that this replica sums."""

    def __init__(
        self, flat: Tensor, layout: Layout, names: tuple[str, ...], size: int, rank: int
    ) -> None:
        super().__init__(flat, layout, names)
        self.slices: list[Slice] = layout.slices(size)
        self.mine = self.slices[rank]
        #: the residual of that slice's sums
        self.sums = Carried(self.residual.kept.new_zeros(self.mine.end - self.mine.start))
        self.carried.append(self.sums)
        #: bytes of an encoded slice
        self.width = 0


class TwoSided(Feedback):
    """The reducer of compressions that encode slices."""

    def __init__(self, collective: Collective, record: Compression, codec: SliceCodec) -> None:
        super().__init__(collective, record)
        self.codec = codec

    def memory(self, flat: Tensor, layout: Layout) -> SliceMemory:
        at = self.collective
        made = SliceMemory(flat, layout, self.keeps, at.size, at.rank)
        made.width = width(self.codec, made.slices, made.sums.kept.itemsize)
        return made

    def send(self, memory: Memory, spoilt: bool) -> None:
        assert isinstance(memory, SliceMemory)
        mine, draft = memory.mine, memory.residual.draft
        self.charge(memory, spoilt)
        out = memory.flat.new_zeros((len(memory.slices), memory.width), dtype=torch.uint8)
        taken = self._take(draft, memory.slices, out[:, _HEAD:])
        if taken is not None:
            self.taken(memory, taken)
        out[:, 0] = spoilt
        received = self.collective.swap(out)
        total = memory.sums.draft.copy_(memory.sums.kept)
        self._add(received[:, _HEAD:], [Slice(0, len(total), mine.lengths)] * len(received), total)
        spoilt = bool(received[:, 0].any()) or not finite(total)
        back = torch.zeros_like(out[0])
        if spoilt:
            back[0] = 1
        else:
            self.codec.take(total, mine.lengths, back[_HEAD:])
        rows = self.collective.collect(back)
        memory.spoilt = bool(rows[:, 0].any())
        if not memory.spoilt:
            self._write(memory, rows)

    def _write(self, memory: SliceMemory, rows: Tensor) -> None:
        flat, residual = memory.flat, memory.residual.kept
        total = flat.zero_() if flat.dtype is residual.dtype else torch.zeros_like(residual)
        self._add(rows[:, _HEAD:], memory.slices, total)
        if total is not flat:
            flat.copy_(total)

    def _take(self, flat: Tensor, slices: Sequence[Slice], rows: Tensor) -> Tensor | None:
        """Encode each slice into a row; returns the indices that were sent exactly, if any."""
        found: list[Tensor] = []
        few = is_small(flat)
        values, into = (flat.numpy(), rows.numpy()) if few else (flat, rows)
        take: Any = self.codec.take_few if few else self.codec.take
        for row, each in zip(into, slices, strict=True):
            places = take(values[each.start : each.end], each.lengths, row)
            if places is not None:
                found.append(torch.as_tensor(places).add_(each.start))
        return torch.cat(found) if found else None

    def _add(self, rows: Tensor, slices: Sequence[Slice], flat: Tensor) -> None:
        """Decode each row and add it to its slice."""
        few = is_small(flat)
        into, wires = (flat.numpy(), rows.numpy()) if few else (flat, rows)
        add: Any = self.codec.add_few if few else self.codec.add
        for wire, each in zip(wires, slices, strict=True):
            add(wire, each.lengths, into[each.start : each.end])

    def charge(self, memory: SliceMemory, spoilt: bool) -> None:
        """Write the gradient plus the residual to the draft."""
        kept, draft = memory.residual.kept, memory.residual.draft
        if spoilt:
            draft.copy_(kept)
        else:
            torch.add(kept, memory.flat, out=draft)

    def taken(self, memory: SliceMemory, places: Tensor) -> None:
        """React to the indices that were sent exactly."""

    def send_dense(self, memory: Memory, spoilt: bool) -> None:
        assert isinstance(memory, SliceMemory)
        part = memory.flat[memory.mine.start : memory.mine.end]
        part.add_(memory.sums.kept)
        memory.sums.draft.zero_()
        super().send_dense(memory, spoilt)

    # --- checkpoints --------------------------------------------------------------------------

    def saved(self, memory: Memory) -> Kept:
        assert isinstance(memory, SliceMemory)
        whole = torch.zeros_like(memory.residual.kept)
        whole[memory.mine.start : memory.mine.end] = memory.sums.kept
        return {**super().saved(memory), "of_sums": memory.layout.split(whole)}

    def restore(self, memory: Memory, kept: Kept) -> None:
        assert isinstance(memory, SliceMemory)
        super().restore(memory, kept)
        whole = torch.zeros_like(memory.residual.kept)
        memory.layout.join(kept.get("of_sums", {}), whole)
        memory.sums.kept.copy_(whole[memory.mine.start : memory.mine.end])


class LargestFirst(TwoSided):
    """Top-k with the momentum of deep gradient compression."""

    def __init__(self, collective: Collective, record: TopK) -> None:
        super().__init__(collective, record, record)
        self.top = record
        self.moves = record.momentum > 0
        if self.moves:
            self.keeps = ("residual", "momentum")
        self.whole = self.whole or record.clip is not None  # clipping needs all gradients

    def charge(self, memory: SliceMemory, spoilt: bool) -> None:
        if not self.moves:
            if self.top.clip is not None and not spoilt:
                memory.flat.mul_(self._clipped(memory.flat))
            super().charge(memory, spoilt)
            return
        residual, moved = memory.residual.draft, memory.by_name["momentum"].draft
        residual.copy_(memory.residual.kept)
        self._move(memory, spoilt)
        residual.add_(moved)

    def _move(self, memory: SliceMemory, spoilt: bool) -> Tensor:
        """Write the momentum that includes this gradient to its draft."""
        moved = memory.by_name["momentum"].draft
        torch.mul(memory.by_name["momentum"].kept, self.top.momentum, out=moved)
        if not spoilt:
            moved.add_(memory.flat, alpha=self._clipped(memory.flat))
        return moved

    def _clipped(self, flat: Tensor) -> float:
        """Return the factor by which this replica's gradient is clipped."""
        if self.top.clip is None:
            return 1.0
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        limit = self.top.clip / math.sqrt(self.collective.size)
        return limit / norm if norm > limit else 1.0

    def taken(self, memory: SliceMemory, places: Tensor) -> None:
        if self.moves and self.top.masking:
            memory.by_name["momentum"].draft.index_fill_(0, places, 0.0)

    def send_dense(self, memory: Memory, spoilt: bool) -> None:
        assert isinstance(memory, SliceMemory)
        if not self.moves:
            if self.top.clip is not None and not spoilt:
                memory.flat.mul_(self._clipped(memory.flat))
        elif spoilt:
            memory.by_name["momentum"].draft.copy_(memory.by_name["momentum"].kept)
        else:
            memory.flat.copy_(self._move(memory, spoilt))
        super().send_dense(memory, spoilt)
