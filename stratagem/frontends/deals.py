"""Data for workers that come for it: the chief deals batches, whoever is free takes one.

    arrays        only numbers travel: every worker has the arrays and the same order
    datasets      indices travel, and the worker fetches the examples
    streams       the chief reads, and the rows travel
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from stratagem.data.shard import count_rows
from stratagem.frontends.feeds import (
    ArrayFeed,
    Feed,
    LoaderFeed,
    Portion,
    StreamFeed,
    portion_of,
)
from stratagem.strategies.parameters.source import (
    Indices,
    Source,
    parts_of_indices,
    parts_of_rows,
    read,
)
from stratagem.strategies.parameters.worker import Work, Worker


class Dealer(Protocol):
    """One feed, cut into tickets."""

    @property
    def dealt(self) -> int:
        """Batches dealt in this epoch."""

    def open(self, worker: Worker, number: int, epoch: int, limit: int | None) -> None:
        """As the chief: begin an epoch, the training's `number`-th."""

    def fill(self) -> None:
        """As the chief: see to it that enough waits to be taken."""

    def portion(self, work: Work, first: int, device: torch.device) -> Portion:
        """The rows of a ticket; `first` is the number of the training's first epoch."""


class ArrayDealer:
    """Arrays: a ticket's number says everything."""

    def __init__(self, feed: ArrayFeed, parts: int) -> None:
        self.feed, self._parts = feed, parts
        self.dealt = 0

    def open(self, worker: Worker, number: int, epoch: int, limit: int | None) -> None:
        feed = self.feed
        steps = feed.steps if limit is None else min(limit, feed.steps)
        self.dealt = steps
        rest = min(feed.batch_size, feed.length - (steps - 1) * feed.batch_size)
        runs = [(steps - 1, min(self._parts, feed.batch_size)), (1, min(self._parts, rest))]
        worker.deal(number, 0, [run for run in runs if run[0]], True)

    def fill(self) -> None:
        return None

    def portion(self, work: Work, first: int, device: torch.device) -> Portion:
        ticket = work.ticket
        return self.feed.part(first + work.epoch - 1, ticket.batch, ticket.part, ticket.parts)


class ParcelDealer:
    """Everything else: what is needed travels with the ticket."""

    def __init__(self, batches: Callable[[], Iterator[Any]], parts: int,
                 unpack: Callable[[Any], Portion]) -> None:  # fmt: skip
        self._batches, self._parts, self._unpack = batches, parts, unpack
        self._source: Source | None = None

    @property
    def dealt(self) -> int:
        return self._source.dealt if self._source is not None else 0

    def open(self, worker: Worker, number: int, epoch: int, limit: int | None) -> None:
        self._source = Source(worker, number, islice(self._batches(), limit), self._parts)
        self._source.fill()

    def fill(self) -> None:
        assert self._source is not None
        self._source.fill()

    def portion(self, work: Work, first: int, device: torch.device) -> Portion:
        return self._unpack(work.payload)


def dealer(feed: Feed, parts: int) -> Dealer:
    """The dealer for a feed."""
    if isinstance(feed, ArrayFeed):
        return ArrayDealer(feed, parts)
    if isinstance(feed, LoaderFeed) and feed.loader is not None:
        loader = feed.loader
        if not isinstance(loader.dataset, IterableDataset):
            return _indexed(loader, parts)
    assert isinstance(feed, StreamFeed | LoaderFeed)
    return ParcelDealer(
        lambda: map(parts_of_rows, feed.batches()), parts,
        lambda payload: _whole(payload["rows"], payload["total"]),
    )  # fmt: skip


def _indexed(loader: DataLoader[Any], parts: int) -> Dealer:
    indices = Indices(loader)

    def unpack(payload: Any) -> Portion:
        chosen = payload["indices"]
        return portion_of(read(loader, chosen), (len(chosen), payload["total"]))

    return ParcelDealer(lambda: map(parts_of_indices, indices), parts, unpack)


def _whole(batch: Any, total: int) -> Portion:
    return portion_of(batch, (count_rows(batch), total))
