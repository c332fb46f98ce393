"""Whether a loss of one's own is a mean over rows: tried by the chief on some of its shares.

A function that returns one number can only be taken for the mean over the rows of its share; of
several numbers the mean is taken, over as many for each row. A sum, a masked mean or a loss that
compares rows with each other is something else, and replicas would add up to another result than
one device. So the number of a share is compared with those of its two halves; shares of one row are
put together first. Only the loss is computed again, from the outputs that are there, at batches 1,
2, 4, 8, ...: a mask may come later.
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

from stratagem.errors import NotDistributable, StratagemError
from stratagem.frontends.feeds import Portion
from stratagem.frontends.halves import halves, together, ways_of
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
        self.open = replica.count > 1 and replica.leads and self._loss is not None
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
            if not _alike(whole, mean, []):
                self.open = False  # it draws random numbers
                return
            if count > 1:
                check_mean(function, pair, count, whole)
            else:
                before, self._single = self._single, pair
                ways = ways_of(function, pair, 1, whole)
                if before is None:
                    return  # the next one, then
                both = function(*together(before, pair, ways))
                _compare(both, [function(*before), whole], [1, 1])
        self._next = 2 * self._seen


def check_mean(function: Callable[..., Tensor], pair: list[Any], count: int, whole: Tensor) -> None:
    """Raise unless `whole`, the function's number for all rows, is the mean over them; or its
    numbers, if it returns several, are as many for each row and their mean is that of the rows."""
    parts = _values_of_halves(function, pair, count, whole)
    _compare(whole, parts, [count // 2, count - count // 2])


def check_values(function: Callable[..., Any], pair: list[Any], count: int, whole: Tensor) -> None:
    """Raise unless `whole`, the function's several numbers, are those of the halves together,
    however many some rows have: wherever every number counts alike."""
    parts = _values_of_halves(function, pair, count, whole)
    number = sum(part.numel() for part in parts)
    added = sum(float(part.float().sum()) for part in parts)
    if number != whole.numel() or not _alike(whole, added / max(number, 1), parts):
        raise NotDistributable(
            f"{whole.numel()} values for {count} rows are not the {number} of their halves."
        )


def _values_of_halves(
    function: Callable[..., Any], pair: list[Any], count: int, whole: Tensor
) -> list[Tensor]:
    """What the function returns for each half of the rows; `whole` is what it does for all."""
    cut = halves(pair, count, ways_of(function, pair, count, whole))
    return [torch.as_tensor(function(*half)) for half in cut]


def _compare(whole: Tensor, parts: list[Tensor], counts: list[int]) -> None:
    count = sum(counts)
    if not _is_even(whole, parts, counts):
        raise NotDistributable(
            f"the loss returns {whole.numel()} values for {count} rows and {parts[0].numel()} for "
            f"{counts[0]} of them: not as many for each row, so the means over the shares of "
            "replicas do not add up to the loss of one device; return as many values for each row, "
            'use a loss that counts its targets, such as "cross_entropy" with its ignore_index, '
            "or use one device."
        )
    mean = sum(_mean(part) * rows for part, rows in zip(parts, counts, strict=True)) / count
    if _alike(whole, mean, parts):
        return
    numbers = f"({_mean(whole):.6g} for {count} rows, {mean:.6g} as the mean of their halves)"
    if whole.dim():
        raise NotDistributable(
            f"the loss returns {whole.numel()} values whose mean is not the mean over the rows "
            f"{numbers}, so the shares of replicas do not add up to the loss of one device; return "
            "a value for each row that depends on no other row, or use one device."
        )
    raise NotDistributable(
        f"the loss returns one number that is not the mean over the rows {numbers}, so the shares "
        "of replicas do not add up to the loss of one device; return a value for each row "
        '(reduction="none"), use a loss that counts its targets, such as "cross_entropy", or use '
        "one device."
    )


def _is_even(whole: Tensor, parts: list[Tensor], counts: list[int]) -> bool:
    """Whether there are as many values for each row, or as many for any rows: a mean by column."""
    total, sizes = whole.numel(), [part.numel() for part in parts]
    by_row = all(n * sum(counts) == total * rows for n, rows in zip(sizes, counts, strict=True))
    return by_row or all(n == total for n in sizes)


def _detached(tree: Any) -> Any:
    """But for parameters: those are the same for any rows."""

    def plain(leaf: Any) -> Any:
        held = not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter)
        return leaf if held else leaf.detach()

    return tree_map(plain, tree)


def _double(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same loss; one that counts its calls, or keeps statistics, does not notice."""
    double: Any = copy.copy(function)
    if not isinstance(double, nn.Module):
        return double  # type: ignore[no-any-return]
    buffers = {name: buffer.clone() for name, buffer in double.named_buffers()}
    return lambda *pair: torch.func.functional_call(double, buffers, pair)


def _mean(value: Tensor) -> float:
    return float(value.float().mean())


def _alike(whole: Tensor, together: float, parts: list[Tensor]) -> bool:
    value = _mean(whole)
    if not math.isfinite(value):
        return True  # training has gone wrong in another way
    tolerance = 0.05 if whole.dtype in (torch.float16, torch.bfloat16) else 1e-3
    size = max(_mean(each.float().abs()) for each in (whole, *parts))
    return abs(value - together) <= tolerance * size + _FLOOR
