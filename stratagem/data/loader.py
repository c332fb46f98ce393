"""A DataLoader whose every batch is this replica's share of the global batch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from stratagem.data.shard import agreed_batches, rows, rows_of, share
from stratagem.errors import NotDistributable, UsageError
from stratagem.wire.collective import Collective
from stratagem.wire.tree import broadcast_tree

#: what fetches the shares of loaders whose workers persist, for as long as the loaders are there:
#: as on one device, workers outlast a fit, and their seed is drawn once
_persistent: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = (
    weakref.WeakKeyDictionary()
)

#: told before each batch: how many examples are this replica's, and how many there are
Announce = Callable[[int, int], None]


class ShareSampler:
    """Batches of this replica's indices; remembers the sizes for whoever consumes the batches."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        #: given while somebody iterates
        self.collective: Collective | None = None
        self.sizes: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        collective = self.collective
        assert collective is not None
        self.sizes.clear()
        for batch in agreed_batches(self.batches, collective):
            start, end = share(len(batch), collective.size, collective.rank)
            self.sizes.append((end - start, len(batch)))
            # An empty share borrows an example, so that the loop's body can run; it weighs 0.
            yield batch[start:end] or batch[:1]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class ShareLoader:
    """Iterates like the loader it was made from, over shares of the same global batches."""

    def __init__(
        self, loader: DataLoader[Any], collective: Collective, announce: Announce,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.loader = loader
        self.collective = collective
        self._announce = announce
        self._at_end = at_end
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._inner: DataLoader[Any] | None = None
        check_sampler(loader)
        if not isinstance(loader.dataset, IterableDataset):
            if loader.batch_sampler is None:
                raise NotDistributable(
                    "the DataLoader has batch_size=None, so there is no global batch to split; "
                    "give it a batch_size or a batch_sampler."
                )
            self._inner = _fetcher(loader)
            self._sampler: Any = self._inner.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._mapped() if self._inner is not None else self._streamed()
        self._at_end()

    def _mapped(self) -> Iterator[Any]:
        assert self._inner is not None
        self._sampler.collective = self.collective
        try:
            for batch in self._inner:
                self._announce(*self._sampler.sizes.popleft())
                yield batch
        finally:
            self._sampler.collective = None  # workers that persist must not keep a strategy alive

    def _streamed(self) -> Iterator[Any]:
        """The chief reads the stream; everybody gets each batch and keeps its share."""
        size, rank = self.collective.size, self.collective.rank
        for batch in stream(self.loader, self.collective):
            total = rows_of(batch)
            start, end = share(total, size, rank)
            self._announce(end - start, total)
            yield rows(batch, start, end) if end > start else rows(batch, 0, 1)


def stream(source: Iterable[Any], collective: Collective) -> Iterator[Any]:
    """The chief's batches, whole, on every replica. Collective; no two readers, no pickle."""
    if collective.size == 1:
        yield from source
        return
    batches = iter(source) if collective.rank == 0 else None
    nothing = object()
    while True:
        batch = next(batches, nothing) if batches is not None else None
        told = broadcast_tree(collective, None if batch is nothing else [batch])
        if told is None:
            return
        yield told[0]


def check_sampler(loader: DataLoader[Any]) -> None:
    """Refuse a loader that yields its process' part of the data only, as torch's
    DistributedSampler does: of that part replicas would get shares, and the rest nobody."""
    batches: Any = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        parts = getattr(sampler, "num_replicas", 1)
        if hasattr(sampler, "rank") and isinstance(parts, int) and parts > 1:
            raise UsageError(
                f"the DataLoader's {type(sampler).__name__} takes one part in {parts} of the data, "
                "and the rest would be lost; leave the sampler out and give the DataLoader "
                "shuffle=True: stratagem deals out the data itself."
            )


def _fetcher(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader that fetches this replica's shares."""
    if not loader.persistent_workers:
        return _like(loader)
    if loader not in _persistent:
        _persistent[loader] = _like(loader)
    return _persistent[loader]


def _like(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader with a sampler of shares."""
    assert loader.batch_sampler is not None
    extra: dict[str, Any] = {}
    if loader.num_workers:
        extra = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset, batch_sampler=ShareSampler(loader.batch_sampler),
        collate_fn=loader.collate_fn, num_workers=loader.num_workers, pin_memory=loader.pin_memory,
        timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, generator=loader.generator,
        **extra,
    )  # fmt: skip
