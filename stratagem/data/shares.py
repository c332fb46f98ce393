"""Shares of a global batch: which replica gets which examples.

Contiguous shares whose sizes differ by at most one, the larger ones first: the batch
[0 1 2 3 4] on two replicas is [0 1 2] and [3 4]. Nothing is padded, nothing is lost; a replica's
share is empty when there are fewer examples than replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stratagem.errors import NotDistributable
from stratagem.wire.collective import Collective
from stratagem.wire.tree import broadcast_tree

_CHUNK = 1024  # batches whose indices travel in one message

#: opens a context in which random draws order the data
Ordering = Callable[[], AbstractContextManager[None]]


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return the first and one-past-last example of share `index` of `parts`."""
    each, extra = divmod(total, parts)
    start = index * each + min(index, extra)
    return start, start + each + (index < extra)


def agreed_batches(
    batches: Iterable[Sequence[int]], collective: Collective, ordering: Ordering = nullcontext
) -> Iterator[list[int]]:
    """Iterate over the chief's batches of indices on every replica. Collective.

    Only the chief draws from the sampler, so any sampler works, random ones included; and it draws
    when one device would: a loop that is left early leaves the generators as one device would.
    """
    if collective.rank != 0:
        return _followed(collective)
    whole: Any = batches
    with ordering():
        if draws_at_once(whole):
            return _led(whole, iter(whole.sampler), collective, ordering)
        return _led_one_by_one(iter(whole), collective, ordering)


def draws_at_once(batches: Any) -> bool:
    """Whether batches come from a sampler of torch's that draws everything with its first row, so
    that it can be read ahead; only at its end torch's RandomSampler draws once more."""
    if type(batches) is not BatchSampler:
        return False
    sampler: Any = batches.sampler
    if type(sampler) is RandomSampler:
        enough = not sampler.replacement and len(sampler) <= len(sampler.data_source)
        return enough or sampler.generator is None
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def _led(
    batches: Any, source: Iterator[int], collective: Collective, ordering: Ordering
) -> Iterator[list[int]]:
    """As the chief: broadcast indices in chunks; the sampler's end is drawn when it is reached."""
    size, drop = batches.batch_size, batches.drop_last

    def rows_in_order() -> Iterator[int]:
        left = len(batches.sampler)
        while True:
            asked = min(left, size * _CHUNK)
            with ordering():
                chunk = _integers(islice(source, asked))
            left = left - asked if len(chunk) == asked else 0
            sent = {"rows": torch.tensor(chunk, dtype=torch.int64), "left": left}
            broadcast_tree(collective, sent | {"size": size, "drop": drop})
            yield from chunk
            if not left:
                break
        with ordering():
            next(source, None)

    return iter(BatchSampler(rows_in_order(), size, drop))


def _led_one_by_one(
    source: Iterator[Any], collective: Collective, ordering: Ordering
) -> Iterator[list[int]]:
    """As the chief: ask a sampler of an unknown kind only when a batch is due."""
    while True:
        with ordering():
            drawn = next(source, None)
        batch = None if drawn is None else _integers(drawn)
        rows = None if batch is None else torch.tensor(batch, dtype=torch.int64)
        broadcast_tree(collective, {"batch": rows})
        if batch is None:
            return
        yield batch


def _followed(collective: Collective) -> Iterator[list[int]]:
    """As any other replica: iterate over the batches that the chief broadcasts."""
    message = broadcast_tree(collective)
    if "batch" not in message:
        rows = _followed_rows(message, collective)
        yield from BatchSampler(rows, message["size"], message["drop"])
        return
    while message["batch"] is not None:
        yield message["batch"].tolist()
        message = broadcast_tree(collective)


def _followed_rows(message: Any, collective: Collective) -> Iterator[int]:
    yield from message["rows"].tolist()
    while message["left"]:
        message = broadcast_tree(collective)
        yield from message["rows"].tolist()


def _integers(batch: Iterable[Any]) -> list[int]:
    try:
        return [int(i) for i in batch]
    except (TypeError, ValueError) as error:
        raise NotDistributable(
            "the loader's sampler yields something other than whole numbers, which cannot be "
            f"dealt out to replicas ({error}); use a sampler of indices."
        ) from error


def rows(tree: Any, start: int, end: int) -> Any:
    """Cut rows start..end out of everything in a batch that has a row for each example.

    That is every tensor, and every column: a list or tuple without tensors, as long as the batch
    has rows (texts, ids, a dict of facts for each example, ...). Everything else is structure and
    kept: a dict, a NamedTuple, a list with tensors somewhere inside, one of another length. Of a
    list of tuples of texts that could be both, the tuples are the columns: torch's own collate
    function makes them so when an example has several texts.
    """
    return _cut(tree, start, end, count_rows(tree))


def own_rows(batch: Any, parts: int, index: int) -> tuple[Any, int, int]:
    """Return the rows of share `index` of a batch, their number, and that of the batch's rows.

    An empty share borrows a row, so that a loop's body can run; it weighs nothing. One device has
    the batch as it is, whatever that may be.
    """
    if parts == 1:
        total = count_rows(batch)
        total = total if total >= 0 else 1  # the rows cannot be counted
        return batch, total, total
    total = rows_of(batch)
    start, end = share(total, parts, index)
    return rows(batch, start, end) if end > start else rows(batch, 0, 1), end - start, total


def map_parts(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each part of a dict, list or tuple; return anything else as it is."""
    if isinstance(tree, dict):
        return same_kind(tree, {key: function(part) for key, part in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(function, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map(function, tree))
    return tree


def with_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same tree with `change(tensor)` in place of every tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    return map_parts(lambda part: with_tensors(part, change), tree)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors of a tree, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    for part in _parts(tree):
        yield from tensors_in(part)


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, list | tuple) else ()


def same_kind(tree: dict[Any, Any], parts: dict[Any, Any]) -> dict[Any, Any]:
    """Put parts into a dict of the same class, whose entries may be attributes, too."""
    if type(tree) is dict:
        return parts
    made = copy.copy(tree)
    beside = getattr(made, "__dict__", {})
    for key, part in parts.items():
        made[key] = part
        if key in beside and beside[key] is tree[key]:
            beside[key] = part
    return made


def _cut(tree: Any, start: int, end: int, total: int) -> Any:
    if isinstance(tree, torch.Tensor):
        if tree.dim() and len(tree) != total:
            raise NotDistributable(
                f"a batch is cut along the first axis, into shares or microbatches, and has "
                f"tensors of {total} and of {len(tree)} rows there; give each of them a row for "
                "every example, before any axis of time (batch_first=True), or use a dataset with "
                "indices, of which each replica puts its own share together."
            )
        return tree[start:end] if tree.dim() else tree
    is_list = isinstance(tree, list | tuple) and not hasattr(tree, "_fields")
    if is_list and len(tree) == total and not _has_tensors(tree) and not _has_columns(tree):
        return tree[start:end]
    return map_parts(lambda part: _cut(part, start, end, total), tree)


def _has_tensors(tree: object) -> bool:
    return next(tensors_in(tree), None) is not None


def _has_columns(tree: Sequence[Any]) -> bool:
    """Whether the members of a list are columns of texts in tuples, and not rows."""
    return all(
        isinstance(part, tuple)
        and len(part) == len(tree)
        and _is_column(part)
        and all(isinstance(text, str) for text in part)
        for part in tree
    )


def _is_column(tree: object) -> bool:
    """Whether a value is a list of plain values."""
    if not isinstance(tree, list | tuple) or hasattr(tree, "_fields") or not tree:
        return False
    return not any(isinstance(part, torch.Tensor | dict | list | tuple) for part in tree)


def count_rows(tree: object) -> int:
    """Return the number of examples in a batch: the length of its first tensor; without tensors,
    that of its lists of plain values, -1 if there are none or of several lengths."""
    tensors = _lengths(tree, lambda t: isinstance(t, torch.Tensor) and t.dim() > 0)
    first = next(tensors, None)
    if first is not None:
        return first
    columns = set(_lengths(tree, _is_column))
    return columns.pop() if len(columns) == 1 else -1


def rows_of(batch: object) -> int:
    """Return the number of examples in a batch that is to be cut into shares."""
    total = count_rows(batch)
    if total < 0:
        raise NotDistributable(
            "a batch has neither a tensor nor lists of one length, so it is not clear what its "
            "rows are, which replicas share; put a tensor with a row for each example into it."
        )
    return total


def _lengths(tree: Any, has_rows: Callable[[Any], bool]) -> Iterator[int]:
    """Iterate over the lengths of everything in a tree that has rows, in order."""
    if has_rows(tree):
        yield len(tree)
        return
    for part in _parts(tree):
        yield from _lengths(part, has_rows)
