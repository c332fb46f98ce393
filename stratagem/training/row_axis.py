"""Finds the axis of the rows in the tensors of an autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

_WALK = 200  # nodes that are visited at most to find out what a tensor depends on


class RowAxis:
    """Examines the graph of one loss over `rows` rows, if that number is known."""

    def __init__(self, rows: int | None) -> None:
        self.rows = rows

    def is_free(self, node: Any) -> bool:
        """Whether a tensor has no row axis."""
        return is_number(node) or self.found_in(node) == "free"

    def found_in(self, node: Any) -> str:
        """Return "rows" if a tensor has a row axis, "free" if that was reduced, "mixed" if both
        come together, "single" or "ranked" if rows were picked by place or by rank."""
        found: set[str] = set()
        todo, seen = [node], 0
        while todo and seen < _WALK:
            each = todo.pop()
            name, seen = each.name(), seen + 1
            if name.endswith("AccumulateGrad"):
                continue
            verdict = self._verdict(each, name)
            if verdict is None:
                todo += [below for below, _ in each.next_functions if below is not None]
            else:
                found.add(verdict)
        for odd in ("single", "ranked"):
            if odd in found:
                return odd
        if "free" in found and "rows" in found:
            return "mixed"
        return "free" if "free" in found else "rows"

    def _verdict(self, node: Any, name: str) -> str | None:
        """Classify a node alone: "" for weights, None where its inputs decide."""
        shape = node._input_metadata[0].shape
        if name not in BY_VALUE and name not in JOINS and len(shape):
            return "ranked" if name in RANKED and self._takes_rows(node) else "rows"
        if not len(shape) or (prod(shape) == 1 and self.rows != 1):
            return "" if self.is_fixed(node) else "free"
        rows = self.rows or 0
        if name in WITH_DIM:
            return "free" if self._takes_rows(node) else None
        if name in SOFTMAX:
            return "mixed" if len(shape) > 1 and 0 in dims_of(node, len(shape)) else None
        if name in ("SelectBackward0", "UnbindBackward0", "SliceBackward0"):
            if only_input(node).name().endswith("AccumulateGrad"):
                return ""
            sizes = sizes_of(node) or (rows,)
            kept = shape[0] if name == "SliceBackward0" else 1
            single = 0 in dims_of(node, len(sizes)) and sizes[0] == rows > kept
            return "single" if single else None
        return None

    def _takes_rows(self, node: Any) -> bool:
        """Whether a node works along the row axis of its input."""
        below = only_input(node)
        sizes = sizes_of(node) or (_shape(below) if below is not None else ())
        return self.of(sizes) in dims_of(node, len(sizes) or 1)

    def of(self, sizes: Sequence[int]) -> int:
        """Return the row axis: the first, unless only another one is as long as the share."""
        rows = self.rows
        return sizes.index(rows) if rows in sizes[1:] and sizes[0] != rows else 0

    def is_picked(self, node: Any) -> bool:
        """Whether rows were picked just before, so that their number depends on values."""
        for _ in range(8):
            if node is None:
                return False
            name = node.name()
            if name == "MaskedSelectBackward0":
                return True
            if name == "IndexBackward0":
                return any(
                    isinstance(t, Tensor) and (t.dtype is torch.bool or len(t) != self.rows)
                    for t in node._saved_indices[:1]
                )
            if name not in BY_VALUE:
                return False
            node = only_input(node)
        return False

    def is_fixed(self, node: Any) -> bool:
        """Whether a node depends on weights only, and on no data."""
        todo, seen = [node], 0
        while todo:
            each = todo.pop()
            seen += 1
            name = each.name()
            if name.endswith("AccumulateGrad"):
                continue
            if seen > _WALK or name in LOOKUPS or _takes_data(each, name):
                return False
            todo += [below for below, _ in each.next_functions if below is not None]
        return True


def _takes_data(node: Any, name: str) -> bool:
    """Whether an operand without a gradient may be data.

    A tensor of a weight's own shape is not (an earlier value, a mask, an importance).
    """
    inputs = [below for below, _ in node.next_functions if below is not None]
    if len(inputs) == len(node.next_functions):
        return not inputs
    if name in NUMBERS or name in SUMS:
        shape = tuple(node._input_metadata[0].shape)
        return all(_shape(below) != shape for below in inputs)
    return True


def _shape(node: Any) -> tuple[int, ...]:
    variable = getattr(node, "variable", None)
    return tuple(node._input_metadata[0].shape if variable is None else variable.shape)


def is_number(node: Any) -> bool:
    return all(prod(meta.shape) == 1 for meta in node._input_metadata)


def sizes_of(node: Any) -> Sequence[int]:
    return tuple(getattr(node, "_saved_self_sym_sizes", ()))


def dims_of(node: Any, count: int) -> list[int]:
    dims = getattr(node, "_saved_dim", None)
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return list(range(count))
    # torch saves negative ones as unsigned numbers of 64 bits
    return [
        (d - 2**64 if d >= 2**63 else d) % max(count, 1)
        for d in ([dims] if isinstance(dims, int) else dims)
    ]


def only_input(node: Any) -> Any:
    return next((below for below, _ in node.next_functions if below is not None), None)


# --- Names of autograd's nodes, by what they do to the rows of a batch ----------------------------


#: the output is a multiple of the one input, or a part of it
LINEAR = {
    "NegBackward0",
    "CloneBackward0",
    "ToCopyBackward0",
    "AliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "ViewBackward0",
    "ReshapeAliasBackward0",
    "UnsafeViewBackward0",
    "MulBackward1",
    "SelectBackward0",
    "ExpandBackward0",
}
SUMS = {"AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "RsubBackward1"}
JOINS = {"StackBackward0", "CatBackward0"}
#: reductions that are neither sums nor means, along one axis or over all
_REDUCED = {
    "LogsumexpBackward0",
    "LinalgVectorNormBackward0",
    "NormBackward0",
    "NormBackward1",
    "MaxBackward0",
    "MaxBackward1",
    "MinBackward0",
    "MinBackward1",
    "StdBackward0",
    "VarBackward0",
    "ProdBackward0",
    "ProdBackward1",
    "MedianBackward0",
    "MedianBackward1",
    "AmaxBackward0",
    "AminBackward0",
}
#: functions of a mean (or a sum) over rows that are no mean (or sum) over rows
CURVED = _REDUCED | {
    "SqrtBackward0",
    "RsqrtBackward0",
    "PowBackward0",
    "PowBackward1",
    "LogBackward0",
    "Log1PBackward0",
    "Log2Backward0",
    "Log10Backward0",
    "ExpBackward0",
    "Expm1Backward0",
    "AbsBackward0",
    "ClampBackward0",
    "ClampBackward1",
    "ClampMinBackward0",
    "ClampMaxBackward0",
    "ReluBackward0",
    "ReciprocalBackward0",
    "TanhBackward0",
    "SigmoidBackward0",
    "SoftplusBackward0",
    "MaximumBackward0",
    "MinimumBackward0",
}
#: pick rows by comparing them
RANKED = {"TopkBackward0", "SortBackward0"}
SOFTMAX = {"LogSoftmaxBackward0", "SoftmaxBackward0"}
#: products and powers
NUMBERS = {"MulBackward0", "DivBackward0", "PowBackward0", "PowBackward1"}
#: reduce along one axis
WITH_DIM = _REDUCED | {"SumBackward1", "MeanBackward1"}
LOOKUPS = {
    "EmbeddingBackward0",
    "EmbeddingBagBackward0",
    "GatherBackward0",
    "IndexSelectBackward0",
    "IndexBackward0",
    "MaskedSelectBackward0",
}
#: rows of the output are rows of the input
BY_VALUE = (
    SUMS
    | NUMBERS
    | CURVED
    | LINEAR
    | SOFTMAX
    | WITH_DIM
    | {"WhereBackward0", "SliceBackward0", "UnbindBackward0"}
)
