"""Batches that the chief reads and deals, far enough ahead that no worker waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem.data.loader import is_stream
from stratagem.data.passes import PassJournal, dice_of
from stratagem.data.shares import count_rows, rows, share
from stratagem.errors import NotDistributable
from stratagem.servers.client import Client

log = logging.getLogger("stratagem")

#: queued batches per worker
AHEAD = 2

#: cuts one batch into at most so many parts
Cut = Callable[[int], list[dict[str, Any]]]


class BatchSource:
    """Deals the batches of an iterator to the workers."""

    def __init__(
        self,
        worker: Client,
        epoch: int,
        batches: Iterator[Cut],
        parts: int,
        *,
        first: int = 0,
        ends: Callable[[int], bool] = lambda dealt: False,
    ) -> None:
        """`first`: the number of the first batch; `ends(dealt)`: whether to stop after so many."""
        assert worker.plan is not None
        self._ends = ends
        self._worker, self._epoch, self._batches, self._parts = worker, epoch, batches, parts
        self._ahead = AHEAD * worker.plan.workers
        self._left = 0
        #: whether dealing is finished, and whether the iterator is exhausted
        self.closed = self.dry = False
        #: the number of the next batch
        self.dealt = self._first = first

    def fill(self) -> None:
        """Deal until enough batches are queued, or none is left."""
        if self.closed:
            return
        if self.dealt > self._first:
            self._left = self._worker.deal(self._epoch, self.dealt, [], False)
        wanted = self._ahead - self._left // self._parts
        if wanted <= 0:
            return
        runs, parcels, first = [], [], self.dealt
        for _ in range(wanted):
            if self._ends(self.dealt):
                self.closed = True
                break
            cut = next(self._batches, None)
            if cut is None:
                self.closed = self.dry = True
                break
            parts = cut(self._parts)
            runs.append((1, len(parts)))
            parcels += parts
            self.dealt += 1
        self._worker.deal(self._epoch, first, runs, self.closed, parcels)


def read(loader: DataLoader[Any], indices: list[int]) -> Any:
    """Make the batch of these rows as the loader would."""
    collate: Any = loader.collate_fn
    dataset: Any = loader.dataset
    if getattr(dataset, "__getitems__", None) is not None:
        return collate(dataset.__getitems__(indices))
    return collate([dataset[i] for i in indices])


def say_who_reads(loader: DataLoader[Any]) -> None:
    """Log that workers read their own rows, without the processes of the loader."""
    if loader.num_workers and not is_stream(loader):
        log.warning(
            "with parameter servers every worker reads the rows of its batches itself, while "
            "values are on their way: the loader's num_workers=%d%s is not used.",
            loader.num_workers,
            " and worker_init_fn" if loader.worker_init_fn else "",
        )


class IndexSource:
    """Batches of indices, in the loader's own order."""

    def __init__(self, loader: DataLoader[Any], journal: PassJournal | None = None) -> None:
        self._loader, self._begun = loader, False
        self._journal = PassJournal() if journal is None else journal
        found = [loader.generator, getattr(loader.sampler, "generator", None)]
        self._dice = [dice for dice in found if isinstance(dice, torch.Generator)]
        #: for each batch drawn in this pass: the states of the rngs
        self._drawn: list[list[torch.Tensor]] = []

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one pass."""
        loader = self._loader
        self._journal.begin(dice_of(loader))
        if not (self._begun and loader.persistent_workers):
            # A loader draws a seed for its workers first, from the rng that may also shuffle.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._begun = True
        self._journal.before_first()
        batches: Any = loader.batch_sampler
        self._drawn = []
        for batch in self._journal.rest(iter(batches)):
            self._drawn.append([dice.get_state() for dice in self._dice])
            yield batch

    def rewind(self, taken: int) -> None:
        """Reset the rngs to a pass that was left after so many batches."""
        if 0 < taken <= len(self._drawn):
            for dice, state in zip(self._dice, self._drawn[taken - 1], strict=True):
                dice.set_state(state)


def source_of(
    worker: Client, loader: DataLoader[Any], indices: IndexSource, epoch: int
) -> BatchSource:
    """Return the source of one pass of a custom loop over its loader."""
    assert worker.plan is not None
    parts = worker.plan.parts
    borrow = parts == worker.plan.workers > 1
    if not is_stream(loader) and loader.batch_sampler is None:
        raise NotDistributable(
            "the DataLoader has batch_size=None, so there is no batch to deal out; give it a "
            "batch_size or a batch_sampler."
        )
    batches, cut = (loader, parts_of_rows) if is_stream(loader) else (indices, parts_of_indices)
    return BatchSource(worker, epoch, map(partial(cut, borrow=borrow), batches), parts)


def parts_of_indices(batch: Any, *, borrow: bool = False) -> Cut:
    """Cut a batch of indices; the worker that gets them reads the examples."""
    indices = [int(i) for i in batch]

    def cut(parts: int) -> list[dict[str, Any]]:
        bounds = _bounds(len(indices), parts, borrow)
        return [{"indices": indices[a:b], **told} for a, b, told in bounds]

    return cut


def parts_of_rows(batch: Any, *, borrow: bool = False) -> Cut:
    """Cut a batch of examples, which are sent themselves."""
    total = count_rows(batch)

    def cut(parts: int) -> list[dict[str, Any]]:
        bounds = _bounds(total, parts, borrow)
        return [{"rows": rows(batch, a, b), **told} for a, b, told in bounds]

    return cut


def _bounds(total: int, parts: int, borrow: bool) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield bounds of parts. `borrow`: of so many parts, where an empty one borrows the first
    example, which weighs nothing: every worker runs its loop's body for every batch."""
    count = parts if borrow and total > 0 else max(1, min(parts, total))
    for start, end in (share(total, count, part) for part in range(count)):
        if start == end:
            yield 0, 1, {"total": total, "borrowed": True}
        else:
            yield start, end, {"total": total}
