"""Masks and weights on the values that a loss adds up, read from its graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from stratagem.training.row_axis import only_input


def chain(node: Any) -> Iterator[Any]:
    """A node, and the few below it."""
    for _ in range(8):
        if node is None:
            return
        yield node
        node = only_input(node)


def weights_on(below: Any) -> Iterator[Tensor]:
    """The masks and weights by which values are multiplied just before they are added up."""
    for node in chain(below):
        name, weights = node.name(), None
        if name == "MulBackward0":
            weights = operand(node)
        elif name == "WhereBackward0":
            weights = node._saved_condition
        elif name.startswith("MaskedFillBackward"):
            weights = ~node._saved_mask
        elif name.startswith("BinaryCrossEntropy"):
            weights = node._saved_weight
        if isinstance(weights, Tensor) and weights.dim() and weights.numel():
            yield weights


def operand(node: Any) -> Any:
    """The operand of a product or quotient that is not in the graph."""
    other = getattr(node, "_saved_other", None)
    return getattr(node, "_saved_self", None) if other is None else other
