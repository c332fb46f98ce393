"""The tensors of a batch carry its share: what each of them was fetched with."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor


class Size(NamedTuple):
    """The size of a share; the shares of two batches of one size are alike."""

    examples: int
    total: int
    announced: bool = True
    #: with servers: the part of the batch that this worker was dealt
    part: float = 1.0

    @property
    def rows(self) -> int:
        """The rows here; a replica without any borrows one."""
        return self.examples or 1

    def __str__(self) -> str:
        return f"{self.examples} of {self.total} rows"


class Batch:
    """A batch that was fetched; exists as long as one of its tensors."""

    def __init__(self, size: Size, source: object, number: int, watched: bool) -> None:
        self.size, self.source, self.number = size, source, number
        #: whether forward was looked at since it was fetched
        self.watched = watched


class Marks:
    """Which batch objects were fetched with, as long as they exist."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Batch]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def put(self, tree: Any, batch: Batch) -> int:
        """Mark what can carry a batch; return how many objects that are."""
        leaves, known = carriers(tree), self._known
        for leaf in leaves:
            at = id(leaf)
            known[at] = weakref.ref(leaf, partial(_forget, known, at)), batch
        return len(leaves)

    def of(self, leaf: Any) -> Batch | None:
        """Return the batch that an object, or what it is a view of, was fetched with."""
        whole = leaf._base if isinstance(leaf, Tensor) else None
        for each in (leaf, whole) if whole is not None else (leaf,):
            mark = self._known.get(id(each))
            if mark is not None and mark[0]() is each:
                return mark[1]
        return None

    def others(self, latest: Batch | None) -> set[Size]:
        """Return the sizes of batches that the loop keeps, unlike the latest one."""
        kept = {batch.size for _, batch in self._known.values()}
        return kept - {latest.size} if latest is not None else set()


def _forget(marks: dict[int, Any], at: int, gone: weakref.ref[Any]) -> None:
    if at in marks and marks[at][0] is gone:
        del marks[at]


def carriers(tree: Any) -> list[Any]:
    """The tensors in a tree, and objects of classes that are not known here."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return [] if type(tree).__weakrefoffset__ == 0 or isinstance(tree, type) else [tree]
    return [leaf for part in tree for leaf in carriers(part)]
