"""Counters of the time that this process waits, loads and sends, and of the bytes that it sends.

    wait    for other replicas, or for a ticket of the servers
    load    drawing batches from the dataset
    link    sending gradients to the servers, and receiving values
    bytes   given to be sent or all-reduced

The counters only grow. `training/step_figures.py` takes their differences for each step; the rest
of a step's time is computation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Meter:
    """The counters, in seconds and bytes; without a lock, since a lost addition does no harm."""

    __slots__ = (
        "bytes",
        "doing",
        "generation",
        "is_loading",
        "link",
        "load",
        "loss",
        "losses",
        "passes",
        "pushes",
        "since",
        "staleness",
        "wait",
    )

    def __init__(self) -> None:
        self.wait = self.load = self.link = 0.0
        self.bytes = 0
        #: gradients that were pushed to servers, and the sum of their staleness in updates
        self.pushes = self.staleness = 0
        #: how often the membership has changed
        self.generation = 0
        #: the sum of the batches' losses that this process knows, and their number
        self.loss, self.losses = 0.0, 0
        #: epochs that have begun: the time between two epochs is no part of a step
        self.passes = 0
        #: "wait" or "load" while the process waits or loads, and since when
        self.doing, self.since = "", 0.0
        self.is_loading = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Time the drawing of a batch, without waits inside of it."""
        if self.is_loading:  # a loader inside a loader
            yield
            return
        before, started = self.wait, time.perf_counter()
        self.is_loading, self.doing, self.since = True, "load", started
        try:
            yield
        finally:
            self.load += time.perf_counter() - started - (self.wait - before)
            self.is_loading, self.doing = False, ""

    def next_of(self, source: Iterator[T], nothing: object) -> T | object:
        """Return the next batch of a source, or `nothing` at its end, and time it."""
        if self.is_loading:
            return next(source, nothing)
        before, started = self.wait, time.perf_counter()  # as `loading`, in a third of its time
        self.is_loading, self.doing, self.since = True, "load", started
        try:
            return next(source, nothing)
        finally:
            self.load += time.perf_counter() - started - (self.wait - before)
            self.is_loading, self.doing = False, ""

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Time a transfer of tensors to or from servers."""
        before, started = self.wait, time.perf_counter()
        try:
            yield
        finally:
            self.link += time.perf_counter() - started - (self.wait - before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for other tasks."""
        started = self.begin_wait()
        try:
            yield
        finally:
            self.end_wait(started)

    def begin_wait(self) -> float:
        """Begin a wait; return the time."""
        self.doing, self.since = "wait", time.perf_counter()
        return self.since

    def end_wait(self, started: float) -> None:
        """End the wait that began at `started`."""
        self.wait += time.perf_counter() - started
        self.doing = ""


#: the meter of this process
METER = Meter()


def loading(batches: Iterable[T]) -> Iterator[T]:
    """Iterate over batches, and time how long drawing them takes."""
    METER.passes += not METER.is_loading
    nothing = object()
    with METER.loading():
        source = iter(batches)
    while (item := METER.next_of(source, nothing)) is not nothing:
        yield item  # type: ignore[misc]
