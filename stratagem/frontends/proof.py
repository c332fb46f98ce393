"""Whether a loss of one's own is a mean over rows: tried by the chief on some of its shares.

A function that returns one number can only be taken for the mean over the rows of its share. A
sum, a masked mean or a loss that compares rows with each other is something else, and replicas
would add up to another result than one device. So the number of a share is compared with those
of its two halves; shares of one row are put together first. Only the loss is computed again, from
the outputs that are there, at batches 1, 2, 4, 8, ...: a mask may come later.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stratagem.data.shard import rows
from stratagem.errors import NotDistributable, StratagemError
from stratagem.frontends.feeds import Portion
from stratagem.frontends.losses import Loss, RowLoss
from stratagem.strategies.replica import Replica

log = logging.getLogger("stratagem")

_FLOOR = 1e-6  # below this, rounding is all that is left


class Proof:
    """Asked at every batch; acts at ever fewer of them."""

    def __init__(self, loss: Loss, replica: Replica) -> None:
        self.replica = replica
        self._loss = loss if isinstance(loss, RowLoss) and loss.own else None
        #: whether the loss is still to be tried
        self.open = replica.count > 1 and replica.is_chief and self._loss is not None
        self._seen, self._next = 0, 1
        #: output and target of a share of one row
        self._single: Any = None

    def settle(self, portion: Portion, output: Any, target: Any, numerator: Tensor) -> None:
        """Raise if this share shows that its loss is no mean over rows."""
        if portion.examples == 0 or portion.weight is not None:
            return  # nothing to compare; and weights need a value a row anyway
        self._seen += 1
        if self._seen < self._next:
            return
        assert self._loss is not None
        mean = float(numerator.detach()) / portion.examples
        try:
            self._try(self._loss, _detached([output, target]), portion.examples, mean)
        except StratagemError:
            raise
        except Exception as error:
            self.open = False
            log.warning(
                "the loss cannot be tried on a part of a batch (%s: %s), so its number is taken "
                "for the mean over the rows, unchecked.", type(error).__name__, error,
            )  # fmt: skip

    @torch.no_grad()
    def _try(self, loss: RowLoss, pair: list[Any], count: int, mean: float) -> None:
        device = self.replica.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            function = _double(loss.function)
            whole = function(*pair)
            if whole.dim() > 0 or not _alike(whole, mean, []):
                self.open = False  # a value a row; or it draws random numbers
                return
            if count == 1:
                _check_rows(pair, 1)
                before, self._single = self._single, pair
                if before is None:
                    return  # the next one, then
                pair, count = _together(before, pair), 2
                whole = function(*pair)
            check_mean(function, pair, count, whole)
        self._next = 2 * self._seen


def check_mean(
    function: Callable[..., Tensor], pair: list[Any], count: int, whole: Tensor
) -> None:
    """Raise unless `whole`, the function's number for all rows, is the mean over them."""
    _check_rows(pair, count)
    half = count // 2
    parts = [float(function(*rows(pair, *cut))) for cut in ((0, half), (half, count))]
    together = (parts[0] * half + parts[1] * (count - half)) / count
    if not _alike(whole, together, parts):
        raise NotDistributable(
            "the loss returns one number that is not the mean over the rows "
            f"({float(whole):.6g} for {count} rows, {together:.6g} as the mean of their "
            "halves), so the shares of replicas do not add up to the loss of one device; "
            'return a value for each row (reduction="none"), or use one device.'
        )


def _detached(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _together(first: list[Any], second: list[Any]) -> list[Any]:
    """The rows of two shares as those of one."""
    joined: list[Any] = tree_map(
        lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, first, second
    )
    return joined


def _double(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same loss; one that counts its calls, or keeps statistics, does not notice."""
    double: Any = copy.copy(function)
    if not isinstance(double, nn.Module):
        return double  # type: ignore[no-any-return]
    buffers = {name: buffer.clone() for name, buffer in double.named_buffers()}
    return lambda *pair: torch.func.functional_call(double, buffers, pair)


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
