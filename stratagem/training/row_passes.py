"""Backward passes over the rows of `strategy.rows`: all rows in each, or one row at a time.

x, y = strategy.rows((x, y))                         passes over all rows are right
for task in strategy.rows(tasks): backward()         a mean over replicas for each: refused
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from stratagem.data.shares import map_parts, tensors_in
from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import version_of


class Column(list[Any]):
    """A list with a value for each row, which knows whether a loop over it is under way."""

    loops = 0

    def __iter__(self) -> Iterator[Any]:
        self.loops += 1
        try:
            yield from super().__iter__()
        finally:
            self.loops -= 1

    def __reduce__(self) -> Any:
        return list, (self[:],)


def with_columns(tree: Any, rows: int) -> Any:
    """The same rows, whose lists know when they are looped over."""
    if type(tree) is list and len(tree) == rows and not any(map(_is_structure, tree)):
        return Column(tree)
    return map_parts(lambda part: with_columns(part, rows), tree)


def _columns_in(tree: Any) -> Iterator[Column]:
    if isinstance(tree, Column):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _columns_in(part)


def _is_structure(part: object) -> bool:
    return isinstance(part, Tensor | dict | list | tuple)


class RowPasses:
    """The backward passes since the latest call of `strategy.rows`, in one replica."""

    def __init__(self, rows: Any) -> None:
        self._columns = list(_columns_in(rows))
        #: passes that were added up, and the version of a weight at the latest of them
        self._added = 0
        self._version: int | None = None
        #: the shapes of all rows; what a single row looks like: what it is a view of, and its shape
        self._whole = {each.shape for each in tensors_in(rows) if each.dim()}
        self._single = {(id(each._base), each.shape[1:]) for each in tensors_in(rows) if each.dim()}
        self._all_rows = self._one_row = False

    def enter(self, inputs: Sequence[Any], *, whole: bool) -> None:
        """Note what a forward pass has: tensors of all rows, as they were cut or as large as that,
        or a single row."""
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        self._all_rows |= whole or any(each.shape in self._whole for each in tensors)
        views = [each for each in tensors if each._base is not None]
        self._one_row |= any((id(each._base), each.shape) in self._single for each in views)

    def begin(self, rows: int, models: Sequence[nn.Module]) -> None:
        """Refuse the pass that begins if each is of a row: by a loop, by its input, or if as many
        are added up as there are rows."""
        params = [p for model in models for p in model.parameters() if p.requires_grad]
        version = version_of(params[0]) if params else None
        adds = version == self._version and any(p.grad is not None for p in params)
        self._added, self._version = self._added + 1 if adds else 1, version
        looped = any(each.loops for each in self._columns)
        single = self._one_row and rows == 1
        if looped or single or (not self._all_rows and self._added == rows > 1):
            raise NotDistributable(
                "call one strategy.backward(sum_of_losses / len(mine), count=len(mine)) in place "
                "of a backward() for each of the rows (tasks) mine = strategy.rows(tasks), and "
                "leave out what divides gradients later: each backward() is a mean over the "
                "replicas, so passes for single rows do not add up to those of one device."
            )
