"""Lists of numbers, nested as one likes, are arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from stratagem.errors import UsageError

_NUMBER = (bool, int, float, complex, np.generic)


def is_numbers(tree: Any) -> bool:
    """Whether it is a list of numbers, of lists of numbers, ...; the first of each tells."""
    if not isinstance(tree, list | tuple):
        return False
    while isinstance(tree, list | tuple) and tree:
        tree = tree[0]
    return isinstance(tree, _NUMBER)


def from_lists(tree: Any) -> Any:
    """The same tree with arrays in place of lists of numbers."""
    if is_numbers(tree):
        return _array(tree)
    if isinstance(tree, dict):
        return {key: from_lists(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(from_lists(value) for value in tree)
    return tree


def _array(rows: Any) -> Any:
    try:
        array = np.asarray(rows)
    except ValueError:
        array = None
    if array is None or array.dtype.kind not in "biufc":
        raise UsageError(
            "a list of numbers does not make an array; give every row the same number of values "
            "and no gaps, or use tensors."
        )
    return array
