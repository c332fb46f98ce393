"""`strategy.gather`: the rows of all replicas, each once.

A replica whose share of a batch is empty borrows the first row, which the first replica has, too.
A tensor of a batch, or one that a forward pass has made, carries the share that it is of. Any other
is taken for what its length says, and its borrowed rows must have the first replica's values:

    gather(predictions)            as long as the share in force
    gather(torch.cat(kept))        as long as all rows of a loader that was read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.training.replica import Replica, as_tensor
from stratagem.wire.tree import gather_tree

#: rows that were borrowed: each with its place here, and on the first replica
Places = list[list[int]]


class ReadRows:
    """How many rows of a loader have come here, and which of them were borrowed."""

    def __init__(self) -> None:
        self.rows = self._first = 0
        self.borrowed: Places = []

    def add(self, examples: int, total: int, count: int) -> None:
        """Note a batch of `total` rows in all, of which `examples` are this replica's own."""
        if not examples:
            self.borrowed.append([self.rows, self._first])
        self.rows += examples or 1
        self._first += -(-total // count)


class Found(NamedTuple):
    """What is known of a tensor's rows."""

    #: whether all of them are borrowed, where the tensor itself says so
    borrowed: bool | None = None
    #: else, by its length, what may be borrowed; [] stands for nothing
    perhaps: Sequence[Places] = ()


def gather_rows(replica: Replica, value: object, axis: int | None) -> list[Tensor]:
    """Gather a tensor of each replica, without the rows that it has borrowed. Collective."""
    if axis is None or replica.count == 1:
        return replica.all_gather(value)  # type: ignore[arg-type]
    tensor, batches = as_tensor(value), replica.loop.batches
    found = Found() if batches is None or not tensor.dim() else batches.rows_of(tensor, axis)
    if found.borrowed:
        tensor = tensor.narrow(axis, 0, 0)
    replica.loop.combined += 1
    everybody = gather_tree(replica.collective, [tensor, list(found.perhaps)])
    first = everybody[0][0]
    parts = [_without(part, perhaps, first, axis) for part, perhaps in everybody]
    return [part.to(tensor.device) for part in parts]


def _without(part: Tensor, perhaps: list[Places], first: Tensor, axis: int) -> Tensor:
    """Cut the borrowed rows out of one replica's tensor."""
    borrowed = [places for places in perhaps if places and _same(part, first, places, axis)]
    if not borrowed and (not perhaps or [] in perhaps):
        return part
    if len(borrowed) != 1 or len(perhaps) > 1:
        raise UsageError(
            "cut what this replica has borrowed before strategy.gather: value[:mine], where mine = "
            "sg.current_replica().share.examples in the loop (0 where a row is borrowed). From its "
            f"length ({part.shape[axis]}) and values it cannot be told which rows these are. For "
            "one value of each replica: sg.current_replica().all_gather(value)."
        )
    gone = {here for here, _ in borrowed[0]}
    own = [row for row in range(part.shape[axis]) if row not in gone]
    return part.index_select(axis, torch.tensor(own, dtype=torch.int64, device=part.device))


def _same(part: Tensor, first: Tensor, places: Places, axis: int) -> bool:
    """Whether rows have the values that they have on the first replica."""
    if max(there for _, there in places) >= first.shape[axis]:
        return False
    here, there = (torch.tensor(each) for each in zip(*places, strict=True))
    mine = part.index_select(axis, here.to(part.device))
    other = first.index_select(axis, there.to(first.device)).to(part.device)
    if not mine.is_complex():
        mine, other = mine.double(), other.double()
    return mine.shape == other.shape and torch.allclose(mine, other, 1e-3, 1e-5, equal_nan=True)
