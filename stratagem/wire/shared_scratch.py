"""Sums and gathers of temporary tensors between CPU processes of one machine.

The tensors of a forward or backward pass have many sizes, so all use two tables that grow, in turn.
One meeting an operation is enough: a process that comes to the next one has read this table, which
is only written again after that.

Every process sums all rows in the same order, so all hold the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.figures.meter import METER
from stratagem.wire.collective import HALF
from stratagem.wire.shared_memory import SharedMemoryCollective, SharedTable


class SharedScratch:
    """Sums and gathers; calls are collective, with equal shapes but for the divided axis."""

    def __init__(self, collective: SharedMemoryCollective) -> None:
        self._collective = collective
        self.rank, self.size = collective.rank, collective.size
        self._tables: list[SharedTable | None] = [None, None]
        self._turn = 0
        #: the sum of the norms of values that must be equal in all processes, for a comparison
        self.seen = 0.0

    def note(self, tensor: Tensor) -> None:
        """Add a value that must be equal in all processes to `seen`."""
        if tensor.is_floating_point():
            self.seen += float(torch.linalg.vector_norm(tensor.detach(), 1))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all processes' tensors, in fresh memory."""
        rows = self._rows(tensor.numel(), tensor.dtype)
        rows[self.rank].view(tensor.shape).copy_(tensor)
        METER.bytes += tensor.nbytes
        self._collective.meet("reduction")
        if tensor.dtype in HALF:
            wide = torch.stack(rows).float().sum(0)
            return wide.to(tensor.dtype).view(tensor.shape)
        total = rows[0] + rows[1] if self.size > 1 else rows[0].clone()
        for row in rows[2:]:
            total += row
        return total.view(tensor.shape)

    def gather(self, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Concatenate all processes' parts along an axis on which sizes differ."""
        if part.shape[dim] != sizes[self.rank]:
            raise NotDistributable(
                f"a value that processes divide has {part.shape[dim]} elements of axis {dim} in "
                f"process {self.rank}, where the first batch had {sizes[self.rank]}; give all "
                "batches one length, or the layer before it the plan 'replicate'."
            )
        shapes = [list(part.shape) for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[dim] = size
        counts = [math.prod(shape) for shape in shapes]
        rows = self._rows(max(counts), part.dtype)
        rows[self.rank][: part.numel()].view(part.shape).copy_(part)
        METER.bytes += part.nbytes
        self._collective.meet("gather")
        parts = zip(rows, counts, shapes, strict=True)
        return torch.cat([row[:count].view(shape) for row, count, shape in parts], dim)

    def _rows(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Return a row of `count` elements for each process, in the table whose turn it is."""
        size = count * dtype.itemsize
        self._turn ^= 1
        table = self._tables[self._turn]
        if table is None or table.count < size:
            table = self._collective.table(size + size // 4 + 1, torch.uint8)
            self._tables[self._turn] = table
        return [row[:size].view(dtype) for row in table.rows]
