"""What `predict` returns: outputs of shares, joined row after row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable, UsageError


def on_cpu(output: Any) -> Any:
    """A share's output, on the CPU; refused if it could not be joined with others."""
    if isinstance(output, Tensor) and output.dim():
        return output.detach().cpu()
    if isinstance(output, dict):
        return {key: on_cpu(value) for key, value in output.items()}
    if isinstance(output, list | tuple):
        return [on_cpu(value) for value in output]
    what = "tensor without rows" if isinstance(output, Tensor) else type(output).__name__
    raise UsageError(
        f"predict joins the outputs of all batches row by row, and the model's output has a {what} "
        "in it; return tensors with a row for each example, or tuples, lists or dicts of them."
    )


def check_rows(parts: Sequence[Any], examples: Sequence[int]) -> None:
    """Raise if outputs of shares, one after the other, are not the output of the whole.

    They are if every example has as many rows in one share as in another, which is mostly one.
    """
    first = parts[0]
    if isinstance(first, dict | list | tuple):
        for key in first if isinstance(first, dict) else range(len(first)):
            check_rows([part[key] for part in parts], examples)
        return
    if not isinstance(first, Tensor):
        return
    each, left = divmod(first.shape[0] if first.dim() else 1, examples[0])
    for part, rows in zip(parts, examples, strict=True):
        if left or not part.dim() or len(part) != each * rows:
            raise NotDistributable(
                f"predict joins the shares of replicas row by row, and an output of shape "
                f"{tuple(part.shape)} for {rows} examples does not begin with its rows; have the "
                "model return it with the examples first (transpose it), or predict on one device."
            )


def joined(parts: list[Any]) -> Any:
    """Outputs of several shares as one."""
    if not parts:
        return torch.empty(0)
    first = parts[0]
    if isinstance(first, Tensor):
        odd = next((p for p in parts if p.shape[1:] != first.shape[1:]), None)
        if odd is not None:
            raise UsageError(
                "predict joins the outputs of all batches row by row, and the model returns rows "
                f"of shape {tuple(first.shape[1:])} and of {tuple(odd.shape[1:])} for different "
                "batches or shares (padded to the longest?); pad to a fixed length."
            )
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    return tuple(joined([part[i] for part in parts]) for i in range(len(first)))
