"""Whether a loss of one's own is a mean over rows: tried on the first batch.

A function that returns one number can only be taken for the mean over the rows of its share. A
sum, a masked mean or a loss that compares rows with each other is something else, and replicas
would add up to another result than one device. So the number of a share is compared with those
of its two halves. Only the loss is computed again, from the outputs that are there.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shard import rows
from stratagem.errors import NotDistributable, StratagemError
from stratagem.frontends.losses import Loss, RowLoss, examples
from stratagem.strategies.replica import Replica
from stratagem.wire.tree import gather_tree

log = logging.getLogger("stratagem")

_FLOOR = 1e-6  # below this, rounding is all that is left


def is_needed(loss: Loss, replica: Replica) -> bool:
    """Whether somebody must look at the first batch; the same on every replica."""
    return replica.count > 1 and isinstance(loss, RowLoss) and loss.own


def settle(loss: Loss, replica: Replica, output: Any = None, target: Any = None) -> None:
    """Try this share (nothing: an empty one); all raise if anybody objects. Collective."""
    assert isinstance(loss, RowLoss)
    mine = ""
    if output is not None:
        try:
            mine = _objection(loss, output, target, replica)
        except StratagemError:
            raise
        except Exception as error:
            if replica.is_chief:
                log.warning(
                    "the loss cannot be tried on a part of a batch (%s: %s), so its number is "
                    "taken for the mean over the rows, unchecked.", type(error).__name__, error,
                )  # fmt: skip
    for words in gather_tree(replica.collective, mine):
        if words:
            raise NotDistributable(words)


@torch.no_grad()
def _objection(loss: RowLoss, output: Any, target: Any, replica: Replica) -> str:
    count, device = examples(output, target), replica.device
    if count < 2:
        return ""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        whole = loss.function(output, target)
        if whole.dim() > 0 or not torch.equal(whole, loss.function(output, target)):
            return ""  # a value a row; or it draws random numbers, and nothing can be compared
        _check_rows([output, target], count)
        half = count // 2
        cuts = [(0, half), (half, count)]
        parts = [float(loss.function(*rows([output, target], *cut))) for cut in cuts]
    together = (parts[0] * half + parts[1] * (count - half)) / count
    if _alike(whole, together, parts):
        return ""
    return (
        f"the loss returns one number that is not the mean over the rows: {float(whole):.6g} for "
        f"the {count} rows of {replica.name}, {together:.6g} as the mean of their halves, so "
        "the shares of replicas do not add up to the loss of one device; return a value for each "
        'row (reduction="none"), or use one device.'
    )


def _alike(whole: Tensor, together: float, parts: list[float]) -> bool:
    value = float(whole)
    if not math.isfinite(value):
        return True  # training has gone wrong in another way
    tolerance = 0.05 if whole.dtype in (torch.float16, torch.bfloat16) else 1e-3
    return abs(value - together) <= tolerance * max(map(abs, (value, *parts))) + _FLOOR


def _check_rows(tree: Any, count: int) -> None:
    """Everything in it must have a row for each example, or halves mean nothing."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0 or len(tree) != count:
            raise ValueError(f"an output or target of shape {list(tree.shape)} for {count} rows")
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            _check_rows(part, count)
