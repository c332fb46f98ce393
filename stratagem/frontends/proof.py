"""Whether a loss of one's own is a mean over rows: tried by the chief on some of its shares.

A function that returns one number can only be taken for the mean over the rows of its share; of
several numbers the mean is taken, over as many for each row. A sum, a masked mean or a loss that
compares rows with each other is something else, and replicas would add up to another result than
one device. So the number of a share is compared with those of its two halves; shares of one row are
put together first. Where there is a value a row, each of them must be the same without the other
half: a row that is scaled by the others' may leave the mean as it is, but not the gradient. Only
the loss is computed again, from the outputs that are there, at batches 1,
2, 4, 8, ...: a mask may come later.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stratagem.errors import NotDistributable, StratagemError
from stratagem.frontends.feeds import Portion
from stratagem.frontends.halves import halves, tensors, together, ways_of
from stratagem.frontends.losses import Loss, RowLoss
from stratagem.strategies.replica import Replica

log = logging.getLogger("stratagem")

_FLOOR = 1e-6  # below this, rounding is all that is left
_TOLERANCE = 1e-3
_HALF, _COARSER = (torch.float16, torch.bfloat16), 50


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
            with self._same_dice():
                crossed = _crosses_rows(self._loss.function, [output, target], portion.examples)
            if crossed:
                raise NotDistributable(
                    "the loss compares the rows of a batch with each other: an output has a row "
                    "and a column for each of them, and those of other replicas are missing, so "
                    "the shares of replicas do not add up to the loss of one device; use one "
                    "device, or a loop of your own, where replica.all_gather brings the others' "
                    "rows, without their gradients."
                ) from error
            self.open = False
            log.warning(
                "the loss cannot be tried on a part of a batch (%s: %s), so its number is taken "
                "for the mean over the rows, unchecked.", type(error).__name__, error,
            )  # fmt: skip

    def _same_dice(self) -> AbstractContextManager[None]:
        """While what is drawn is not missed later."""
        device = self.replica.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    @torch.no_grad()
    def _try(self, loss: RowLoss, pair: list[Any], count: int, mean: float) -> None:
        with self._same_dice():
            function = _double(loss.function)
            whole = function(*pair)
            if not _alike(whole, mean, []) or not _is_steady(function, pair, whole):
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
        if whole.numel() == sum(part.numel() for part in parts):
            _compare_values(whole, parts, counts)
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


def _compare_values(whole: Tensor, parts: list[Tensor], counts: list[int]) -> None:
    if not _same_values(whole, parts, _TOLERANCE):
        raise NotDistributable(
            f"the loss returns {whole.numel()} values for {sum(counts)} rows, and other ones for "
            f"{counts[0]} of them alone: a row's value depends on the other rows, so the shares of "
            "replicas do not add up to the loss of one device; return a value for each row that "
            "depends on no other row, or use one device."
        )


def _is_steady(function: Callable[..., Tensor], pair: list[Any], whole: Tensor) -> bool:
    """Whether several values are the same once more; noise may be lost in their mean."""
    return not whole.dim() or _same_values(whole, [function(*pair)], _TOLERANCE / 10)


def _same_values(whole: Tensor, parts: list[Tensor], tolerance: float) -> bool:
    """In any order: time may come first, or the largest."""
    ours = whole.detach().flatten().float().sort().values
    theirs = torch.cat([part.detach().flatten().float() for part in parts]).sort().values
    if ours.shape != theirs.shape:
        return False
    if not bool(ours.isfinite().all()):
        return True  # training has gone wrong in another way
    if whole.dtype in _HALF:
        tolerance *= _COARSER
    size = float(ours.abs().mean()) if len(ours) else 0.0
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * size + _FLOOR)


@torch.no_grad()
def _crosses_rows(function: Callable[..., Tensor], pair: list[Any], count: int) -> bool:
    """Whether an output has a column for each row, too, and the loss, which fails for some of the
    rows, does not if it gets their columns only: as many classes as rows are something else."""
    if count < 2 or not any(t.shape[:2] == (count, count) for t in tensors(pair[0])):
        return False

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (count,):
            return leaf
        square = leaf.shape[:2] == (count, count)
        return leaf[: count // 2, : count // 2] if square else leaf[: count // 2]

    try:
        _double(function)(*tree_map(part, _detached(pair)))
    except Exception:
        return False
    return True


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
    tolerance = _TOLERANCE * (_COARSER if whole.dtype in _HALF else 1)
    size = max(_mean(each.float().abs()) for each in (whole, *parts))
    return abs(value - together) <= tolerance * size + _FLOOR
