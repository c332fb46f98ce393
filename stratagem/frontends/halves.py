"""A share of a batch cut in two, wherever its tensors have their rows.

Mostly those are in front, one for each example. But logits may be flattened, several rows for each
example; time may come first; and a learnable weight among the outputs has no rows at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.data.shard import rows, same_kind


class Way(NamedTuple):
    """How a tensor gets a row for each example in front, and how it is as it was again."""

    forth: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


_PLAIN = Way(lambda t: t, lambda t: t)
_TIME_FIRST = Way(lambda t: t.transpose(0, 1), lambda t: t.transpose(0, 1))


def _flattened(count: int) -> Way:
    return Way(lambda t: t.reshape(count, len(t) // count, *t.shape[1:]), lambda t: t.flatten(0, 1))


def _whole(count: int) -> Way:
    return Way(lambda t: t.expand(count, *t.shape), lambda t: t[0])


def halves(tree: Any, count: int, ways: Sequence[Way]) -> list[Any]:
    """The first and the second half of `count` examples."""
    half = count // 2
    fronted = _mapped(tree, iter([way.forth for way in ways]))
    cuts = ((0, half), (half, count))
    return [_mapped(rows(fronted, *cut), iter([way.back for way in ways])) for cut in cuts]


def together(first: Any, second: Any, ways: Sequence[Way]) -> Any:
    """The examples of two shares, of as many rows each, as those of one."""
    others = zip(tensors(second), ways, strict=True)
    acts = [
        lambda t, o=other, w=way: w.back(torch.cat([w.forth(t), w.forth(o)]))
        for other, way in others
    ]
    return _mapped(first, iter(acts))


def ways_of(function: Callable[..., Any], tree: Any, count: int, value: Tensor) -> list[Way]:
    """How each tensor is to be cut. Raises if one has no rows and the function looks at it:
    nobody knows then what it is for a part of them; `value` is the function's for all."""
    every = tensors(tree)
    found = [_way(tensor, count, every) for tensor in every]
    odd = [t for t, way in zip(every, found, strict=True) if way is None]
    if odd and not _is_blind(function, tree, found, value):
        raise ValueError(f"an output or target of shape {list(odd[0].shape)} for {count} rows")
    return [way or _whole(count) for way in found]


def _way(tensor: Tensor, count: int, beside: Sequence[Tensor]) -> Way | None:
    if isinstance(tensor, nn.Parameter):
        return _whole(count)  # the same for any rows
    if tensor.dim() == 0:
        return None
    if len(tensor) == count:
        return _PLAIN
    flattened = len(tensor) % count == 0 and _has_blocks(tensor, count, beside)
    time_first = tensor.dim() > 1 and tensor.shape[1] == count
    if time_first and not (flattened and tensor.dim() == 2):
        return _TIME_FIRST
    return _flattened(count) if flattened else None


def _has_blocks(tensor: Tensor, count: int, beside: Sequence[Tensor]) -> bool:
    """Whether another tensor tells that as many rows as this one has belong to each example: a
    length that is a multiple of theirs by chance, of a table say, is nothing to cut."""
    shape = (count, len(tensor) // count)
    return any(
        other is not tensor and (other.shape[:2] == shape or other.shape[:1] == tensor.shape[:1])
        for other in beside
    )


def _is_blind(
    function: Callable[..., Any], tree: Any, ways: Sequence[Way | None], value: Tensor
) -> bool:
    """Whether the function does not look at the tensors that have no way."""

    def spoilt(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise ValueError(f"an output or target of shape {list(tensor.shape)}, without rows")
        return torch.full_like(tensor, torch.nan)

    acts = [spoilt if way is None else _PLAIN.forth for way in ways]
    return torch.equal(torch.as_tensor(function(*_mapped(tree, iter(acts)))), value)


def tensors(tree: Any) -> list[Tensor]:
    """Every one in it, in order."""
    found: list[Tensor] = []
    _mapped(tree, repeat(found.append))
    return found


def _mapped(tree: Any, acts: Iterator[Callable[[Tensor], Any]]) -> Any:
    if isinstance(tree, Tensor):
        return next(acts)(tree)
    if isinstance(tree, dict):
        return same_kind(tree, {key: _mapped(part, acts) for key, part in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_mapped(part, acts) for part in tree])
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(part, acts) for part in tree])
    return tree
