"""Batches that the chief reads, and deals out far enough ahead that nobody waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from stratagem.data.shard import count_rows, rows, share
from stratagem.strategies.parameters.worker import Worker

log = logging.getLogger("stratagem")

#: batches that wait to be taken, for each worker
AHEAD = 2

#: cuts one batch into at most so many parcels
Cut = Callable[[int], list[dict[str, Any]]]


class Source:
    """An iterator of batches on its way to the workers."""

    def __init__(self, worker: Worker, epoch: int, batches: Iterator[Cut], parts: int) -> None:
        assert worker.plan is not None
        self._worker, self._epoch, self._batches, self._parts = worker, epoch, batches, parts
        self._ahead = AHEAD * worker.plan.workers
        self._left, self._dry = 0, False
        #: batches dealt so far
        self.dealt = 0

    def fill(self) -> None:
        """Deal until enough waits, or nothing is left."""
        if self._dry:
            return
        if self.dealt:
            self._left = self._worker.deal(self._epoch, self.dealt, [], False)
        wanted = self._ahead - self._left // self._parts
        if wanted <= 0:
            return
        runs, parcels = [], []
        for _ in range(wanted):
            cut = next(self._batches, None)
            if cut is None:
                self._dry = True
                break
            parts = cut(self._parts)
            runs.append((1, len(parts)))
            parcels += parts
        self._worker.deal(self._epoch, self.dealt, runs, self._dry, parcels)
        self.dealt += len(runs)


def read(loader: DataLoader[Any], indices: list[int]) -> Any:
    """The batch of these rows, as the loader would make it; by whoever trains on it."""
    collate: Any = loader.collate_fn
    dataset: Any = loader.dataset
    if getattr(dataset, "__getitems__", None) is not None:
        return collate(dataset.__getitems__(indices))
    return collate([dataset[i] for i in indices])


def say_who_reads(loader: DataLoader[Any]) -> None:
    """Whoever trains on rows, and not the processes that the loader was to have for that."""
    if loader.num_workers and not isinstance(loader.dataset, IterableDataset):
        log.warning(
            "with parameter servers every worker reads the rows of its batches itself, while "
            "values are on their way: the loader's num_workers=%d%s is not used.",
            loader.num_workers, " and worker_init_fn" if loader.worker_init_fn else "",
        )  # fmt: skip


class Indices:
    """Batches of indices, in the order in which the loader itself would take them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self._begun = loader, False
        found = [loader.generator, getattr(loader.sampler, "generator", None)]
        self._dice = [dice for dice in found if isinstance(dice, torch.Generator)]
        #: by batches drawn in this pass: what the dice were then
        self._drawn: list[list[torch.Tensor]] = []

    def __iter__(self) -> Iterator[Any]:
        """One pass."""
        loader = self._loader
        if not (self._begun and loader.persistent_workers):
            # A loader draws a seed for its workers first, from the dice that may shuffle as well.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._begun = True
        batches: Any = loader.batch_sampler
        self._drawn = []
        for batch in batches:
            self._drawn.append([dice.get_state() for dice in self._dice])
            yield batch

    def rewind(self, taken: int) -> None:
        """The pass was left after so many batches: what was drawn ahead was drawn in vain."""
        if 0 < taken <= len(self._drawn):
            for dice, state in zip(self._dice, self._drawn[taken - 1], strict=True):
                dice.set_state(state)


def parts_of_indices(batch: Any) -> Cut:
    """Indices travel; who gets them fetches the examples."""
    indices = [int(i) for i in batch]

    def cut(parts: int) -> list[dict[str, Any]]:
        bounds = _bounds(len(indices), parts)
        return [{"indices": indices[a:b], "total": len(indices)} for a, b in bounds]

    return cut


def parts_of_rows(batch: Any) -> Cut:
    """The examples themselves travel."""
    total = count_rows(batch)

    def cut(parts: int) -> list[dict[str, Any]]:
        return [{"rows": rows(batch, a, b), "total": total} for a, b in _bounds(total, parts)]

    return cut


def _bounds(total: int, parts: int) -> list[tuple[int, int]]:
    count = max(1, min(parts, total))
    return [share(total, count, part) for part in range(count)]
