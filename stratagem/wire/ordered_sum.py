"""One sum in shared memory, to which the replicas of a machine add in the order of their ranks.

An all-reduce needs every replica's gradients at once, a row of a table each. Here there is one row
for all, and a gradient is added to it as soon as backward has made it, then forgotten:

    replica 0   copies c0   copies c1   copies c2
    replica 1               adds c0     adds c1     adds c2
    replica 2                           adds c0     adds c1     adds c2

A chunk has a turn: a number that says whose addition comes next. So each chunk is summed in one
order, and the same numbers give the same bits. Who is early keeps its gradients, up to `WINDOW`
bytes, and goes on; only then does it wait.
"""

from __future__ import annotations

from collections.abc import Sequence

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

_Piece = tuple[int, Tensor | None]  # a chunk, and what is added to it


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
        words = collective.table(max(2 * len(self._homes), 1), torch.int64, rows=1).words()[0]
        self._turns, self._steps = words[: len(self._homes)], words[len(self._homes) :]
        self._step = self._pass = 0
        self._waits = True
        self._added: set[int] = set()
        self._kept: list[_Piece] = []
        self._kept_bytes = 0
        #: the most bytes that this replica has kept at once
        self.most_kept = 0

    @property
    def _mine(self) -> int:
        """The turn that is this replica's in the pass under way."""
        return self._pass * self.collective.size + self.collective.rank

    def begin_step(self) -> None:
        """What is added from now on is another sum; nobody reads the last one any more."""
        self._step += 1

    def has(self, part: int) -> bool:
        """Whether this replica has added to the part in the pass under way."""
        return part in self._added

    def add(self, part: int, values: Tensor) -> None:
        """Add to a part, once a pass; the values are this sum's from now on."""
        self._added.add(part)
        METER.bytes += values.nbytes
        pieces = torch.split(values.reshape(-1), CHUNK)
        self._keep(list(zip(self._chunks[part], pieces, strict=False)))
        self._drain()
        if self._kept_bytes > self.window and self._waits:
            self._waits = self._wait_for_room()

    def end_pass(self) -> None:
        """Pass by what was not added, and wait until everything is in. Every replica calls it."""
        for part, chunks in enumerate(self._chunks):
            if part not in self._added:
                self._keep([(chunk, None) for chunk in chunks])
        self._drain()
        for chunk, values in self._kept:
            self._await(chunk)
            self._give(chunk, values)
        self._kept, self._kept_bytes = [], 0
        self._added.clear()
        self._waits = True
        self._pass += 1

    def _keep(self, pieces: Sequence[_Piece]) -> None:
        self._kept += pieces
        self._kept_bytes += sum(v.nbytes for _, v in pieces if v is not None)

    def _drain(self) -> None:
        """Add whatever has its turn."""
        mine, turns = self._mine, self._turns
        left: list[_Piece] = []
        size = 0
        for chunk, values in self._kept:
            if turns[chunk] == mine:
                self._give(chunk, values)
            else:
                left.append((chunk, values))
                size += 0 if values is None else values.nbytes
        self._kept, self._kept_bytes = left, size
        self.most_kept = max(self.most_kept, size)

    def _wait_for_room(self) -> bool:
        """Wait until no more than the window is kept; False: that took too long."""
        while self._kept_bytes > self.window:
            if not self._await(self._kept[0][0], _PATIENCE):
                return False
            self._drain()
        return True

    def _await(self, chunk: int, limit: float = float("inf")) -> bool:
        mine, turns, size = self._mine, self._turns, self.collective.size
        before = (self.collective.rank - 1) % size
        return self.collective.wait_for(before, lambda: turns[chunk] == mine, limit)

    def _give(self, chunk: int, values: Tensor | None) -> None:
        """Add to a chunk whose turn it is, and say whose is next."""
        self.collective.order_writes()
        if values is not None and self._steps[chunk] == self._step:
            self._homes[chunk].add_(values)
        elif values is not None:
            self._homes[chunk].copy_(values)
            self._steps[chunk] = self._step
        self.collective.order_writes()
        self._turns[chunk] = self._mine + 1
