"""Data for workers that come for it: the chief deals batches, whoever is free takes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

from stratagem.frontends.sources import Portion, Source
from stratagem.servers.batch_source import BatchSource, Cut
from stratagem.servers.client import Assignment, Client


@dataclass
class Segments:
    """An epoch that is dealt in pieces, after each of which all that was dealt is done."""

    #: whether no more is dealt for now, given how many batches of the epoch are
    ends: Callable[[int], bool] = lambda dealt: False
    #: called after a segment with the epoch and that number; says whether the training ends
    rest: Callable[[int, int], bool] = lambda epoch, dealt: False
    #: that number
    dealt: int = 0
    #: segments of all epochs so far
    count: int = 0


class BatchScheduler:
    """A source of data, cut into tickets of at most so many `parts` a batch."""

    def __init__(self, source: Source, parts: int) -> None:
        self._source, self._parts = source, parts
        self._sent: BatchSource | None = None
        self._numbered = self._first = 0
        self._cuts: Iterator[Cut] | None = None

    @property
    def dealt(self) -> int:
        """Batches dealt in this epoch."""
        return self._numbered if self._sent is None else self._sent.dealt

    def open(self, worker: Client, number: int, limit: int | None) -> None:
        """As the chief: begin an epoch, the training's `number`-th."""
        runs = self._source.sizes(limit)
        if runs is None:
            cuts = islice(self._source.cuts(), limit)
            self._sent = BatchSource(worker, number, cuts, self._parts)
            self._sent.fill()
            return
        self._numbered = sum(batches for batches, _ in runs)
        worker.deal(number, 0, [(n, min(self._parts, rows)) for n, rows in runs], True)

    def open_segment(self, worker: Client, number: int, ends: Callable[[int], bool]) -> None:
        """As the chief: begin a segment of an epoch, the training's `number`-th."""
        assert self._cuts is not None
        first = self._sent.dealt if self._sent is not None else self._first
        self._sent = BatchSource(worker, number, self._cuts, self._parts, first=first, ends=ends)
        self._sent.fill()

    def open_epoch(self, epoch: int, limit: int | None) -> None:
        """As the chief: begin an epoch of several segments, or go on with it."""
        self._sent, self._first = None, self._source.journal.seen
        left = None if limit is None else limit - self._first
        if left == 0:
            self._source.leave(nullcontext)
        self._cuts = islice(self._source.numbered(epoch), left)

    @property
    def dry(self) -> bool:
        """Whether the epoch has no more batches."""
        return self._sent is not None and self._sent.dry

    def fill(self) -> None:
        """As the chief: see to it that enough waits to be taken."""
        if self._sent is not None:
            self._sent.fill()

    def portion(self, work: Assignment, first: int) -> Portion:
        """The rows of a ticket; `first` is the number of the training's first epoch."""
        return self._source.part(first + work.epoch - 1, work.ticket, work.payload)
