"""A worker's gradients on their way to the servers: a part for each, piece after piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stratagem.codecs.codec import Codec
from stratagem.servers.training_plan import TrainingPlan


class Outbox:
    """Every number of a gradient, as it is or rounded."""

    def __init__(self, plan: TrainingPlan, codec: Codec, flat: Tensor) -> None:
        """`flat`: memory for all parts, which servers of this machine read."""
        self.plan, self.codec = plan, codec
        layout = plan.layout
        #: by server
        self.plain = [
            flat[layout.offset(i) : layout.offset(i) + load] for i, load in enumerate(layout.loads)
        ]
        #: by server: where each piece begins and ends in its part
        self.slots: list[list[Tensor]] = []
        for part, extents in zip(self.plain, layout.extents, strict=True):
            at = 0
            self.slots.append([])
            for e in extents:
                self.slots[-1].append(part[at : at + e.hi - e.lo])
                at += e.hi - e.lo

    #: whether only some pieces can be told apart by their number
    numbered = False

    def take(self, variable: int, flat: Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        """Take over a variable's gradient, into these pieces (server and number)."""
        for server, number in pieces:
            target, e = self.slots[server][number], self.plan.layout.extents[server][number]
            if target.data_ptr() != flat.data_ptr():  # else it was made there
                self.codec.encode(flat[e.start : e.start + e.hi - e.lo], target)

    def rows(self, variable: int, first: int, numbers: Tensor, values: Tensor) -> Tensor:
        """Rows of a sparse gradient, in the piece that begins with row `first`, as they travel."""
        return self.plan.codec.encode(values, copy=False)

    def part(self, server: int) -> Tensor:
        """The server's part of the gradient as it travels."""
        return self.plain[server]

    def sizes(self, server: int) -> list[int]:
        """By piece: how much of that part it is."""
        return [e.hi - e.lo for e in self.plan.layout.extents[server]]

    def header(self) -> dict[str, Any]:
        """What servers must know to read the gradient."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of a gradient."""
        return sum(self.part(server).nbytes for server in range(len(self.plain)))

    def settle(self, *, counted: bool) -> None:
        """A push is over."""

    def state(self) -> dict[str, Any]:
        """Copy what is kept from one push to the next."""
        return {}

    def load(self, states: Sequence[Any], index: int) -> None:
        """Go on, as worker `index`, from the states of all workers."""
