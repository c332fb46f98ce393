"""A DataLoader whose every batch is this replica's share of the global batch.

Each replica collates its own share, so a collate function that pads to the longest row may make the
shares of one batch unequally wide; a mask makes up for that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from stratagem.data.loader_workers import OutlastSignals, outlasting
from stratagem.data.passes import PassJournal, dice_of
from stratagem.data.shares import (
    Ordering,
    agreed_batches,
    own_rows,
    share,
)
from stratagem.data.streams import mixed
from stratagem.errors import NotDistributable, UsageError
from stratagem.figures.meter import loading
from stratagem.wire.collective import Collective
from stratagem.wire.tree import SIGNED, broadcast_tree

#: by loader with persistent workers, the loader that fetches its shares: as on one device, workers
#: outlast a fit, and their seed is drawn once
_persistent: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = (
    weakref.WeakKeyDictionary()
)

#: called before each batch with the number of this replica's examples, and of all
Announce = Callable[[int, int], None]


class ShareSampler:
    """Batches of this replica's indices; keeps their sizes for the consumer of the batches."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        #: set while an iteration begins
        self.collective: Collective | None = None
        self.ordering: Ordering = nullcontext
        self.journal = PassJournal()
        self.dice: list[torch.Generator] = []
        #: sizes of the batches that the latest iteration has yielded and the loader has not
        self.sizes: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        collective = self.collective
        assert collective is not None
        sizes: deque[tuple[int, int]] = deque()
        self.sizes = sizes
        if collective.rank == 0:
            with self.ordering():
                self.journal.begin(self.dice)
        if collective.size == 1:
            with self.ordering():
                source = iter(self.batches)
            return _whole(self._unseen(in_order(source, self.ordering)), sizes)
        batches = agreed_batches(self.batches, collective, self.ordering)
        return _shares(self._unseen(batches), collective.size, collective.rank, sizes)

    def _unseen(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Skip the batches that were seen before this pass was resumed."""
        ordering, journal = self.ordering, self.journal

        def first() -> Iterator[Any]:
            with ordering():
                journal.before_first()
            yield from batches

        return journal.rest(first(), numbers=True)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def _shares(
    batches: Iterator[list[int]], size: int, rank: int, sizes: deque[tuple[int, int]]
) -> Iterator[list[int]]:
    for batch in batches:
        start, end = share(len(batch), size, rank)
        sizes.append((end - start, len(batch)))
        # An empty share borrows an example, so that the loop's body can run; it weighs 0.
        yield batch[start:end] or batch[:1]


def _whole(batches: Iterator[Any], sizes: deque[tuple[int, int]]) -> Iterator[Any]:
    """On one device: yield what the sampler yields, and note the sizes."""
    for batch in batches:
        known = batch if isinstance(batch, Sized) else list(batch)
        sizes.append((len(known), len(known)))
        yield known


class LoaderWrapper:
    """A wrapper of a loader, with its length and attributes."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # in copy.copy, which makes the object without __init__
            raise AttributeError(name)
        return getattr(self.loader, name)


class ShareLoader(LoaderWrapper):
    """Iterates over this replica's shares of a loader's batches."""

    def __init__(
        self,
        loader: DataLoader[Any],
        collective: Collective,
        announce: Announce,
        at_end: Callable[[], None] = lambda: None,
        ordering: Ordering = nullcontext,
        journal: PassJournal | None = None,
    ) -> None:
        super().__init__(loader)
        self.collective = collective
        self.journal = PassJournal() if journal is None else journal
        self._announce = announce
        self._at_end = at_end
        self._ordering = ordering
        self._inner: DataLoader[Any] | None = None
        check_sampler(loader)
        own_way = loader.batch_sampler is None or type(loader).__iter__ is not DataLoader.__iter__
        # one device takes loaders that make batches in a way of their own
        if not is_stream(loader) and not (collective.size == 1 and own_way):
            if loader.batch_sampler is None:
                raise NotDistributable(
                    "the DataLoader has batch_size=None, so there is no global batch to split; "
                    "give it a batch_size or a batch_sampler."
                )
            self._inner = _fetcher(loader, collective.rank)
            self._sampler: Any = self._inner.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        yield from loading(self._mapped() if self._inner is not None else self._streamed())
        self._at_end()

    def _mapped(self) -> Iterator[Any]:
        assert self._inner is not None
        sampler = self._sampler
        sampler.collective, sampler.ordering = self.collective, self._ordering
        sampler.journal, sampler.dice = self.journal, dice_of(self.loader)
        try:
            with self._ordering():  # a loader draws a seed for its workers
                batches = iter(self._inner)
        finally:  # persistent workers must not keep a strategy alive
            sampler.collective, sampler.ordering = None, nullcontext
        sizes = sampler.sizes
        for batch in batches:
            examples, total = sizes.popleft()
            self._announce(examples, total)
            yield batch

    def _streamed(self) -> Iterator[Any]:
        """Have the chief read the stream; every replica gets each batch and keeps its share."""
        collective = self.collective
        for batch in stream(self.loader, collective, self._ordering, self.journal):
            mine, examples, total = own_rows(batch, collective.size, collective.rank)
            self._announce(examples, total)
            yield mine


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether a loader's rows have no indices, so that only one process can read them."""
    return isinstance(loader.dataset, IterableDataset)


def in_order(source: Iterator[Any], ordering: Ordering) -> Iterator[Any]:
    """Iterate over a source whose random draws order the data."""
    nothing = object()
    while True:
        with ordering():
            item = next(source, nothing)
        if item is nothing:
            return
        yield item


def stream(
    source: Iterable[Any],
    collective: Collective,
    ordering: Ordering = nullcontext,
    journal: PassJournal | None = None,
) -> Iterator[Any]:
    """Yield the chief's whole batches on every replica; only the chief reads. Collective."""
    journal = PassJournal() if journal is None else journal
    batches: Iterator[Any] = iter(())
    if collective.rank == 0:
        with ordering():
            journal.begin(dice_of(source) if isinstance(source, DataLoader) else [])
            with outlasting(source):
                batches = iter(source)
        batches = journal.rest(in_order(batches, ordering))
    else:
        journal.leave()
    if collective.size == 1:
        yield from batches
        return
    nothing = object()
    while True:
        batch = next(batches, nothing)
        sent = broadcast_tree(collective, None if batch is nothing else [batch])
        if sent is None:
            return
        yield sent[0]


def check_sampler(loader: DataLoader[Any]) -> None:
    """Refuse a loader that yields only its process's part of the data, as torch's
    DistributedSampler does: replicas would divide that part, and the rest would be lost."""
    batches: Any = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        parts = getattr(sampler, "num_replicas", 1)
        if hasattr(sampler, "rank") and isinstance(parts, int) and parts > 1:
            raise UsageError(
                f"the DataLoader's {type(sampler).__name__} takes one part in {parts} of the data, "
                "and the rest would be lost; leave the sampler out and give the DataLoader "
                "shuffle=True: stratagem deals out the data itself."
            )


def _fetcher(loader: DataLoader[Any], rank: int) -> DataLoader[Any]:
    """Return the loader that fetches this replica's shares."""
    if not loader.persistent_workers:
        return _like(loader, rank)
    if loader not in _persistent:
        _persistent[loader] = _like(loader, rank)
    return _persistent[loader]


def _own_dice(dice: torch.Generator | None, rank: int) -> torch.Generator | None:
    """Return the generator that seeds a replica's workers. The chief's also orders the data; each
    other replica needs its own, or its rows would get the same noise."""
    if dice is None or rank == 0:
        return dice
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=dice).item())
    return torch.Generator().manual_seed(mixed(drawn, rank))


class RowsAtOnce(Dataset[Any]):
    """The batches of a TensorDataset, each by one indexing operation instead of row by row."""

    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __getitems__(self, chosen: list[int]) -> list[Tensor]:
        tensors = self.inner.tensors
        if not all(map(_is_plain, tensors)) or {*map(type, chosen)} != {int}:
            found: list[Tensor] = default_collate([self.inner[i] for i in chosen])
            return found
        index = torch.tensor(chosen)
        return [each[index] for each in tensors]


def _is_plain(tensor: Tensor) -> bool:
    """Whether indexing gives the same rows as torch's default collate function."""
    known = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return (
        known
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and tensor.dtype not in SIGNED  # which cannot be indexed
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _like(loader: DataLoader[Any], rank: int) -> DataLoader[Any]:
    """Return the same loader with a sampler of shares."""
    assert loader.batch_sampler is not None
    dataset, collate = loader.dataset, loader.collate_fn
    if type(dataset) is TensorDataset and collate is default_collate and not loader.num_workers:
        dataset, collate = RowsAtOnce(dataset), _as_it_is
    extra: dict[str, Any] = {}
    if loader.num_workers:
        extra = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": OutlastSignals(loader.worker_init_fn),
        }
    return DataLoader(
        dataset,
        batch_sampler=ShareSampler(loader.batch_sampler),
        collate_fn=collate,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        generator=_own_dice(loader.generator, rank),
        **extra,
    )
