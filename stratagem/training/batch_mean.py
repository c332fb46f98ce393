"""`strategy.mean`: the mean over the rows of a whole batch, of what each replica has of it."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.figures.meter import METER
from stratagem.training.batch_shares import shares_of
from stratagem.training.custom_loop import reader_of
from stratagem.training.replica import Replica
from stratagem.wire.tree import gather_tree


def mean_of_batch(replica: Replica, value: Tensor | float, count: float | Tensor | None) -> float:
    """The mean over all rows of the batch in hand, of means over shares. Collective."""
    weight, summed = _weight(replica, value, count)
    number = float(torch.as_tensor(value).detach()) if weight else 0.0  # of borrowed rows
    replica.loop.combined += 1
    everybody = gather_tree(replica.collective, [weight, number, summed])
    if any(each for _, _, each in everybody):
        mean = float(sum(v for w, v, _ in everybody if w))
    else:
        # 0: all targets are ignored, and one device has NaN
        count = sum(w for w, _, _ in everybody)
        mean = float(sum(w * v for w, v, _ in everybody if w) / count) if count else nan
    if isinstance(value, Tensor) and value.requires_grad:  # a loss that is trained on
        METER.loss += mean
        METER.losses += 1
    return mean


def _weight(
    replica: Replica, value: Tensor | float, count: float | Tensor | None
) -> tuple[float, bool]:
    """Return what this replica's value weighs, and whether it is a sum."""
    reader, share = reader_of(replica), replica.share
    trained = reader.trained.weight(value) if reader is not None and count is None else None
    if trained is not None:
        return trained
    is_marked = False
    if isinstance(value, Tensor) and value.grad_fn is not None and replica.count > 1:
        is_marked = shares_of(replica).find([value])
    weight = float(share.weight)
    if count is not None:
        return float(count) if weight else 0.0, False
    behind = not share.announced or (replica.loop.inner_over and not is_marked)
    if behind and replica.loop.uneven:
        raise UsageError(
            "strategy.mean comes after the end of a loader whose shares differ in size, so it is "
            "not known how many rows this value is of. Call it in the loop, for each batch, or "
            "say strategy.mean(value, count=n): the number of rows here that it is a mean over."
        )
    if reader is None or not weight:
        return weight, False
    factor, summed = reader.weight_of(value)
    return weight * factor, summed
