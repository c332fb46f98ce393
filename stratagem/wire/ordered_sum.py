"""One sum in shared memory, to which the replicas of a machine add in the order of their ranks.

An all-reduce needs every replica's gradients at once, a row of a table each. Here there is one row
for all, and a gradient is added to it as soon as backward has made it, then forgotten:

    replica 0   copies c0   copies c1   copies c2
    replica 1               adds c0     adds c1     adds c2
    replica 2                           adds c0     adds c1     adds c2

Each replica notes which chunks it has added to in this pass, and whether it is through; it adds to
a chunk when those before it have, or are through. So each chunk is summed in one order, and the
same numbers give the same bits. Who is early keeps its gradients, up to `WINDOW` bytes, and goes
on; only then does it wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from stratagem.figures.meter import METER
from stratagem.wire.shared_memory import SharedMemoryCollective

#: elements that are added at a time, so that the next replica can begin
CHUNK = 1 << 18
#: bytes of gradients that a replica keeps while it is not its turn
WINDOW = 8 << 20
#: seconds to wait in mid-backward. It may be this replica that the others wait for, in a
#: synchronised layer; then gradients are kept instead.
_PATIENCE = 1.0

_Piece = tuple[int, Tensor]  # a chunk, and what is added to it


class OrderedSum:
    """The sum of some flat float32 parts, one set for all replicas. Made collectively."""

    def __init__(
        self, sizes: Sequence[int], collective: SharedMemoryCollective, window: int = WINDOW
    ) -> None:
        self.collective, self.window = collective, window
        self.flat = collective.table(sum(sizes), torch.float32, rows=1).rows[0]
        parts = torch.split(self.flat, list(sizes))
        #: by part, its chunks
        self._chunks: list[range] = []
        self._homes: list[Tensor] = []
        for part in parts:
            homes = torch.split(part, CHUNK) if len(part) else ()
            self._chunks.append(range(len(self._homes), len(self._homes) + len(homes)))
            self._homes += homes
        count = len(self._homes)
        #: by rank: the last pass in which it added to each chunk, and behind them its last pass
        self._passes = collective.table(count + 1, torch.int64).words()
        self._through = count
        #: by chunk: the step of which it holds a sum
        self._steps = collective.table(count + 1, torch.int64, rows=1).words()[0]
        self._step, self._pass = 0, 1
        self._waits = True
        self._added: set[int] = set()
        self._kept: list[_Piece] = []
        self._kept_bytes = 0
        #: the most bytes that this replica has kept at once
        self.most_kept = 0

    def begin_step(self) -> None:
        """Begin another sum; no replica reads the last one any more."""
        self._step += 1

    def has(self, part: int) -> bool:
        """Whether this replica has added to the part in the pass under way."""
        return part in self._added

    def add(self, part: int, values: Tensor) -> None:
        """Add to a part, once a pass; the values are this sum's from now on."""
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
        """Wait until everything that was added is in. Every replica calls it."""
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
        """Wait until no more than the window is kept; False: that took too long."""
        while self._kept_bytes > self.window:
            if not self._await(self._kept[0][0], _PATIENCE):
                return False
            self._drain()
        return True

    def _missing(self, chunk: int) -> int | None:
        """Whom of those before it a chunk waits for. Who has added to it has waited, too."""
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
        """Nobody adds while others still add in the pass before."""
        for rank, passes in enumerate(self._passes):
            ready = partial(_either, passes, self._through, self._through, self._pass - 1)
            if not ready():
                self.collective.wait_for(rank, ready)

    def _give(self, chunk: int, values: Tensor) -> None:
        """Add to a chunk whose turn it is, and note that."""
        self.collective.order_writes()
        if self._steps[chunk] == self._step:
            self._homes[chunk].add_(values)
        else:
            self._homes[chunk].copy_(values)
            self._steps[chunk] = self._step
        self.collective.order_writes()
        self._passes[self.collective.rank][chunk] = self._pass


def _either(passes: memoryview, chunk: int, through: int, wanted: int) -> bool:
    """Whether a replica has added to a chunk in that pass, or is through with it."""
    return bool(passes[chunk] == wanted or passes[through] >= wanted)
