"""A sum in shared memory to which the replicas of a machine add in rank order.

An all-reduce needs every replica's gradients at once, in a row of a table each. Here all replicas
share one row: a gradient is added to it as soon as backward has made it, then freed:

    replica 0   copies c0   copies c1   copies c2
    replica 1               adds c0     adds c1     adds c2
    replica 2                           adds c0     adds c1     adds c2

Each replica publishes the chunks that it has added to in this pass, and whether it has finished the
pass; it adds to a chunk when the ranks before it have added or finished. So each chunk is summed in
one order, and the same numbers give the same bits. A replica that is early keeps its gradients, up
to `WINDOW` bytes, and goes on; only then does it wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from stratagem.figures.meter import METER
from stratagem.wire.shared_memory import SharedMemoryCollective

#: elements added at a time, so that the next replica can begin
CHUNK = 1 << 18
#: bytes of gradients that a replica keeps until its turn
WINDOW = 8 << 20
#: seconds to wait in the middle of backward; then gradients are kept beyond the window, as peers
#: may be waiting for this replica in a synchronised layer
_PATIENCE = 1.0

_Piece = tuple[int, Tensor]  # a chunk, and the numbers to add to it


class OrderedSum:
    """The sum of flat float32 parts, shared by all replicas. Created collectively."""

    def __init__(
        self, sizes: Sequence[int], collective: SharedMemoryCollective, window: int = WINDOW
    ) -> None:
        self.collective, self.window = collective, window
        self.flat = collective.table(sum(sizes), torch.float32, rows=1).rows[0]
        parts = torch.split(self.flat, list(sizes))
        #: by part, its chunks
        self._chunks: list[range] = []
        self._sums: list[Tensor] = []
        for part in parts:
            sums = torch.split(part, CHUNK) if len(part) else ()
            self._chunks.append(range(len(self._sums), len(self._sums) + len(sums)))
            self._sums += sums
        count = len(self._sums)
        #: by rank: the last pass in which it added to each chunk, then the last one it finished
        self._passes = collective.table(count + 1, torch.int64).words()
        self._through = count
        #: by chunk: the step whose sum it holds
        self._steps = collective.table(count + 1, torch.int64, rows=1).words()[0]
        self._step, self._pass = 0, 1
        self._waits = True
        self._added: set[int] = set()
        self._kept: list[_Piece] = []
        self._kept_bytes = 0
        #: the most bytes that this replica has kept at once
        self.most_kept = 0

    def begin_step(self) -> None:
        """Begin another sum; no replica may read the last one any more."""
        self._step += 1

    def has(self, part: int) -> bool:
        """Whether this replica has added to the part in the current pass."""
        return part in self._added

    def add(self, part: int, values: Tensor) -> None:
        """Add to a part, once a pass; the sum owns the values from now on."""
        if not self._added:
            self._await_last_pass()
        self._added.add(part)
        METER.bytes += values.nbytes
        pieces = torch.split(values.reshape(-1), CHUNK)
        self._keep(list(zip(self._chunks[part], pieces, strict=False)))
        self._drain()
        if self._kept_bytes > self.window and self._waits:
            self._waits = self._wait_for_room()

    def end_pass(self) -> None:
        """Wait until all kept gradients are added. Every replica calls it."""
        self._drain()
        for chunk, values in self._kept:
            self._await(chunk)
            self._give(chunk, values)
        self._kept, self._kept_bytes = [], 0
        self._passes[self.collective.rank][self._through] = self._pass
        self._added.clear()
        self._waits = True
        self._pass += 1

    def _keep(self, pieces: Sequence[_Piece]) -> None:
        self._kept += pieces
        self._kept_bytes += sum(values.nbytes for _, values in pieces)

    def _drain(self) -> None:
        """Add the chunks whose turn it is."""
        left: list[_Piece] = []
        size = 0
        for chunk, values in self._kept:
            if self._missing(chunk) is None:
                self._give(chunk, values)
            else:
                left.append((chunk, values))
                size += values.nbytes
        self._kept, self._kept_bytes = left, size
        self.most_kept = max(self.most_kept, size)

    def _wait_for_room(self) -> bool:
        """Wait until the kept gradients fit the window; False if that took too long."""
        while self._kept_bytes > self.window:
            if not self._await(self._kept[0][0], _PATIENCE):
                return False
            self._drain()
        return True

    def _missing(self, chunk: int) -> int | None:
        """Return the rank that a chunk waits for: the last one before that has not added."""
        for rank in range(self.collective.rank - 1, -1, -1):
            passes = self._passes[rank]
            if passes[chunk] == self._pass:
                return None
            if passes[self._through] < self._pass:
                return rank
        return None

    def _await(self, chunk: int, limit: float = float("inf")) -> bool:
        while (rank := self._missing(chunk)) is not None:
            passes, through, mine = self._passes[rank], self._through, self._pass
            ready = partial(_either, passes, chunk, through, mine)
            if not self.collective.wait_for(rank, ready, limit):
                return False
        return True

    def _await_last_pass(self) -> None:
        """Wait until every replica has finished the pass before."""
        for rank, passes in enumerate(self._passes):
            ready = partial(_either, passes, self._through, self._through, self._pass - 1)
            if not ready():
                self.collective.wait_for(rank, ready)

    def _give(self, chunk: int, values: Tensor) -> None:
        """Add to a chunk in this replica's turn, and publish that."""
        self.collective.order_writes()
        if self._steps[chunk] == self._step:
            self._sums[chunk].add_(values)
        else:
            self._sums[chunk].copy_(values)
            self._steps[chunk] = self._step
        self.collective.order_writes()
        self._passes[self.collective.rank][chunk] = self._pass


def _either(passes: memoryview, chunk: int, through: int, wanted: int) -> bool:
    """Whether a replica has added to a chunk in that pass, or has finished the pass."""
    return bool(passes[chunk] == wanted or passes[through] >= wanted)
