"""Collate functions that pad to the longest: each replica puts its own share together, so shares of
one batch may come out unequally wide, and wider or narrower than one device would have them.

Whether that matters only the model knows (a mask makes up for it), so it is said, once a loader.
Only shapes travel, and only of a few batches at the beginning of a call, or of a prepared loader.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from stratagem.strategies.replica import Replica
from stratagem.wire.tree import gather_tree

log = logging.getLogger("stratagem")

_LOOKS = 4  # batches: of sentences drawn at random, hardly any is as wide in all its shares

#: loaders of which it has been said
_said: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


class Widths:
    """Of the shares of one loader's batches. Asked at every batch; acts at the first ones."""

    def __init__(self, loader: DataLoader[Any] | None) -> None:
        self._left = _LOOKS
        # torch's function puts together what has one shape, and of a stream whole batches are cut
        if loader is None or loader.collate_fn is default_collate or _is_stream(loader):
            self._left = 0

    @property
    def looking(self) -> bool:
        """Whether there is anything left to be asked for."""
        return self._left > 0

    def look(self, loader: DataLoader[Any], batch: Any, examples: int, replica: Replica) -> None:
        """Say so if the shares of this batch are not equally wide. Collective."""
        if not self._left or replica.count == 1:
            return
        self._left -= 1
        shapes = _shapes(batch) if examples else []
        everybody = gather_tree(replica.collective, [examples, shapes])
        found = [(at, *told) for at, told in enumerate(everybody) if told[0]]
        for at, count, theirs in found[1:]:
            _, first, ours = found[0]
            for mine, other in zip(ours, theirs, strict=False):
                if _is_padded(mine, first, other, count):
                    self._left = 0
                    _say(loader, replica, mine, other, at)
                    return


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _is_padded(mine: list[int], rows: int, other: list[int], count: int) -> bool:
    """Whether two shapes have their examples along one side and differ along another. What has no
    such side is no padded batch: the nodes of graphs one after another, say."""
    if len(mine) != len(other):
        return False
    pairs = list(zip(mine, other, strict=True))
    return (rows, count) in pairs and any(a != b and (a, b) != (rows, count) for a, b in pairs)


def _say(loader: Any, replica: Replica, mine: list[int], other: list[int], at: int) -> None:
    if not replica.is_chief or loader in _said:
        return
    _said.add(loader)
    log.warning(
        "the loader's collate function makes a tensor of shape %s of replica 0's share of a batch, "
        "and of %s of replica %d's, so it pads to the longest of a share, not of the batch. "
        "If what the model returns depends on the padding (a mean over all positions, say), it is "
        "not what one device would return; pad in the dataset, or to a fixed length.",
        tuple(mine), tuple(other), at,
    )  # fmt: skip


def _shapes(tree: Any) -> list[list[int]]:
    if isinstance(tree, Tensor):
        return [list(tree.shape)]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [shape for part in tree for shape in _shapes(part)]
    return []
