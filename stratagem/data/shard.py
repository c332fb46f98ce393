"""Who gets which examples of a global batch.

Contiguous shares whose sizes differ by at most one, the larger ones first: the batch
[0 1 2 3 4] on two replicas is [0 1 2] and [3 4]. Nothing is padded, nothing is lost; a replica's
share is empty when there are fewer examples than replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from stratagem.errors import NotDistributable
from stratagem.wire.collective import Collective
from stratagem.wire.tree import broadcast_tree

_CHUNK = 1024  # batches whose indices travel in one message


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """First and one-past-last example of share `index` of `parts`."""
    each, extra = divmod(total, parts)
    start = index * each + min(index, extra)
    return start, start + each + (index < extra)


def agreed_batches(
    batches: Iterable[Sequence[int]], collective: Collective
) -> Iterator[list[int]]:
    """The chief's batches of indices, the same on every replica. Collective.

    Only the chief draws from the sampler, so any sampler works, random ones included.
    """
    source = iter(batches) if collective.rank == 0 else iter(())
    while True:
        chunk = [_integers(batch) for batch in islice(source, _CHUNK)]
        told = broadcast_tree(
            collective,
            {"sizes": torch.tensor([len(b) for b in chunk], dtype=torch.int64),
             "indices": torch.tensor([i for b in chunk for i in b], dtype=torch.int64)},
        )  # fmt: skip
        indices = told["indices"].split(told["sizes"].tolist())
        for batch in indices:
            yield batch.tolist()
        if len(told["sizes"]) < _CHUNK:
            return


def _integers(batch: Sequence[int]) -> list[int]:
    try:
        return [int(i) for i in batch]
    except (TypeError, ValueError) as error:
        raise NotDistributable(
            "the loader's sampler yields something other than whole numbers, which cannot be "
            f"dealt out to replicas ({error}); use a sampler of indices."
        ) from error


def rows(tree: Any, start: int, end: int) -> Any:
    """Rows start..end of every tensor in a batch."""
    if isinstance(tree, torch.Tensor):
        return tree[start:end] if tree.dim() else tree
    if isinstance(tree, dict):
        return {key: rows(value, start, end) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rows(value, start, end) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(rows(value, start, end) for value in tree)
    return tree


def count_rows(tree: object) -> int:
    """Examples in a batch: the length of its first tensor."""
    if isinstance(tree, torch.Tensor):
        return len(tree) if tree.dim() else -1
    values: Iterable[object] = ()
    if isinstance(tree, dict):
        values = tree.values()
    elif isinstance(tree, list | tuple):
        values = tree
    for value in values:
        found = count_rows(value)
        if found >= 0:
            return found
    return -1
