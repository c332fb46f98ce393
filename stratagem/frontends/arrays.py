"""What Keras' `fit` does with arrays before it trains: hold some out, weigh classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.frontends.feeds import in_batches, is_arrays
from stratagem.frontends.lists import is_numbers


def prepared(
    data: tuple[Any, Any, Any], validation: Any, split: float | None,
    class_weight: Any,
) -> tuple[tuple[Any, ...], Any]:  # fmt: skip
    """(x, y, sample weights) to train on, and what to validate on."""
    kept: tuple[Any, ...] = data
    if split:
        if validation is not None:
            raise UsageError("give validation_data or validation_split, not both.")
        kept, validation = hold_out(split, *data)
    if class_weight is not None and len(class_weight):
        x, y, weight = kept
        kept = (x, y, by_class(_numbered(class_weight), y, weight))
    return kept, validation


def hold_out(part: float, x: Any, y: Any, weight: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(x, y, sample weights) to train on, and of the last `part` of the examples to validate."""
    if not 0 < part < 1:
        raise UsageError(f"validation_split is {part}; it is a part of the data: 0.2, say.")
    if not is_arrays(x) or (y is None and in_batches(x)):
        raise UsageError(
            f"validation_split cuts arrays and tensors, not a {type(x).__name__}; give what is "
            "held out as validation_data."
        )
    whole = (x, y, weight)
    rows = _length(x)
    cut = int(rows * (1 - part))
    if not 0 < cut < rows:
        raise UsageError(f"validation_split={part} of {rows} examples leaves one side empty.")
    first, last = slice(cut), slice(cut, None)
    return tuple(_rows(t, first) for t in whole), tuple(_rows(t, last) for t in whole)


def _numbered(weights: Any) -> Mapping[int, float]:
    """One weight after the other is as good as by number."""
    return weights if isinstance(weights, Mapping) else dict(enumerate(map(float, weights)))


def by_class(weights: Mapping[int, float], y: Any, weight: Any) -> Tensor:
    """Sample weights that give each example the weight of its class, 1 if it has none."""
    if y is None or not is_arrays(y) or isinstance(y, dict | tuple):
        raise UsageError(
            "class_weight needs y as one array of classes; with other data give sample weights, or "
            "a loss with a weight for each class."
        )
    classes = _classes(torch.as_tensor(np.asarray(y) if isinstance(y, list) else y))
    table = torch.ones(max(int(classes.max()), *weights) + 1)
    for number, value in weights.items():
        table[number] = float(value)
    chosen = table[classes]
    return chosen if weight is None else chosen * torch.as_tensor(weight).reshape(-1)


def _classes(y: Tensor) -> Tensor:
    if y.dim() == 2 and y.shape[1] > 1:
        return y.argmax(1)  # one column for each class
    if y.numel() != len(y) or (y.is_floating_point() and bool((y != y.round()).any())):
        raise UsageError(
            f"class_weight needs a class for each example, not targets of shape {tuple(y.shape)} "
            f"and {y.dtype}; give sample weights instead."
        )
    return y.reshape(-1).long()


def _is_one(tree: Any) -> bool:
    return not isinstance(tree, dict | list | tuple) or is_numbers(tree)


def _length(tree: Any) -> int:
    while not _is_one(tree):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)


def _rows(tree: Any, part: slice) -> Any:
    if tree is None:
        return None
    if _is_one(tree):
        return tree[part]
    if isinstance(tree, dict):
        return {key: _rows(value, part) for key, value in tree.items()}
    parts = [_rows(value, part) for value in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
