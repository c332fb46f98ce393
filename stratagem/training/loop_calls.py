"""What a custom loop may ask of its strategy: a declared count, its rows of a batch, a mean."""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shares import own_rows
from stratagem.errors import UsageError
from stratagem.figures.meter import METER
from stratagem.training.custom_loop import reader_of
from stratagem.training.fingerprint import of_arrays
from stratagem.training.replica import Replica
from stratagem.wire.tree import gather_tree


def backward_counted(
    replica: Replica, loss: Tensor, count: float | Tensor, retain_graph: bool
) -> None:
    """A backward pass of a loss that is divided by `count` on this replica."""
    number = float(count)
    if not number >= 0:
        raise UsageError(f"strategy.backward(count={number:g}); the count is not negative.")
    reader = reader_of(replica)
    if reader is None and replica.count > 1:
        raise UsageError("strategy.backward comes after strategy.prepare(model, optimizer, ...).")
    if reader is None:
        torch.autograd.backward(loss, retain_graph=retain_graph)
        return
    reader.count = number
    try:
        torch.autograd.backward(loss, retain_graph=retain_graph)
    finally:
        reader.count = None


def rows_of_share(replica: Replica, batch: Any) -> Any:
    """The rows of a global batch that are this replica's; its gradient weighs accordingly."""
    mine, examples, total = own_rows(batch, replica.count, replica.index)
    replica.share.set(examples, total)
    replica.cuts += 1
    if replica.count > 1 and replica.cuts & (replica.cuts - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
        _refuse_unlike(replica, batch)
    return mine


def _refuse_unlike(replica: Replica, batch: Any) -> None:
    look = of_arrays(batch, "batch")
    mine = [[name, value] for name, value in look.items() if value is not None]
    for i, theirs in enumerate(gather_tree(replica.collective, mine)):
        for (name, a), (_, b) in zip(mine, theirs, strict=False):
            if not torch.equal(a, b) if isinstance(a, Tensor) else a != b:
                raise UsageError(
                    f"strategy.rows is given another batch here than on replica {i} ({name} "
                    "differs), so some rows would be trained twice and others never. Replicas "
                    "draw random numbers of their own after prepare: shuffle with a generator "
                    "that is seeded alike on all (torch.randperm(n, generator=...)), or before "
                    "prepare."
                )


def mean_of_batch(replica: Replica, value: Tensor | float, count: float | Tensor | None) -> float:
    """The mean over all rows of the batch in hand, of means over shares. Collective."""
    reader, share = reader_of(replica), replica.share
    weight, summed = float(share.weight), False
    if count is not None:
        weight = float(count) if weight else 0.0
    elif reader is not None and weight:
        factor, summed = reader.weight_of(value)
        weight *= factor
    number = float(torch.as_tensor(value).detach()) if weight else 0.0  # of borrowed rows
    replica.meetings += 1
    told = gather_tree(replica.collective, [weight, number, summed])
    if any(each for _, _, each in told):
        mean = float(sum(v for w, v, _ in told if w))
    else:
        count = sum(w for w, _, _ in told)  # 0: every target is ignored, and one device has NaN
        mean = float(sum(w * v for w, v, _ in told if w) / count) if count else nan
    if isinstance(value, Tensor) and value.requires_grad:  # a loss that is trained on
        METER.loss += mean
        METER.losses += 1
    return mean
