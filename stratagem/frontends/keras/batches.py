"""Batches as replicas share them."""

from __future__ import annotations

from typing import Any

import keras
import torch

from stratagem.errors import NotDistributable


def rows_of(data: Any) -> int:
    """Examples in a batch, of which every part of it must have a row each."""
    parts = [t for t in keras.tree.flatten(data) if isinstance(t, torch.Tensor) and t.dim()]
    lengths = sorted({len(part) for part in parts})
    if len(lengths) != 1:
        raise NotDistributable(
            f"the parts of a batch have {' and '.join(map(str, lengths)) or 'no'} rows; replicas "
            "share a batch by its rows, so all its parts need a row for each example."
        )
    return lengths[0]


def as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    return torch.as_tensor(keras.ops.convert_to_tensor(leaf))
