"""What one step of a model costs on this machine, and when each part of its gradient is ready.

    forward   |==========|
    backward             |==[b0]====[b1]========[b2]|      buckets, as they become full
    optimizer                                       |===|
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from stratagem.errors import UsageError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """A variable whose gradient is sparse: rows, their bytes, and how many a batch touches."""

    rows: int
    row_bytes: int
    touched: float

    @property
    def sent_bytes(self) -> float:
        """What travels of its gradient: rows, and the number of each."""
        return self.touched * (self.row_bytes + 8)


@dataclass(frozen=True)
class Bucket:
    """A part of the gradient, and when it is there, in seconds after backward began."""

    size: int
    ready: float


@dataclass(frozen=True)
class Profile:
    """One replica's step on `batch` examples; times in seconds."""

    name: str
    batch: int
    forward: float
    backward: float
    optimizer: float
    #: in the order in which backward makes them; the last one leaves when backward has ended
    buckets: tuple[Bucket, ...]
    #: of the dense variables, for cutting them up
    shapes: tuple[Shape, ...] = ()
    sparse: tuple[Table, ...] = ()
    #: measured forward and backward passes, for their spread; the mean is forward + backward
    samples: tuple[float, ...] = ()
    device: str = "cpu"
    threads: int = 1
    #: forward and backward with one thread, where `threads` is more
    single_thread: float | None = None
    #: (n, forward and backward) while n replicas of this machine compute at the same time
    crowd: tuple[tuple[int, float], ...] = ()
    itemsize: int = 4

    def __post_init__(self) -> None:
        times = [self.forward, self.backward, self.optimizer, *self.samples]
        if self.batch < 1 or self.threads < 1 or not all(0 <= t < math.inf for t in times):
            raise UsageError(
                f"the profile of {self.name!r} has a batch, a thread count or a time that cannot "
                "be; measure it again."
            )

    @property
    def dense_bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)

    @property
    def sparse_bytes(self) -> float:
        """What travels of the sparse gradients of one batch."""
        return sum(table.sent_bytes for table in self.sparse)

    @property
    def bytes(self) -> float:
        """What travels of one gradient."""
        return self.dense_bytes + self.sparse_bytes

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def spread(self) -> tuple[float, ...]:
        """Samples relative to their mean, in order, so that they fit any speed."""
        mean = math.fsum(self.samples) / len(self.samples) if self.samples else 0.0
        return tuple(s / mean for s in sorted(self.samples)) if mean > 0 else (1.0,)

    def with_threads(self, threads: int) -> float:
        """Forward and backward with so many threads: a serial part, and one that they share."""
        if self.single_thread is None or self.threads == 1 or threads == self.threads:
            return self.compute
        shared = (self.single_thread - self.compute) / (1 - 1 / self.threads)
        shared = min(max(shared, 0.0), self.single_thread)
        return self.single_thread - shared + shared / max(1, min(threads, self.threads))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        given = dict(plain)
        known = {field.name for field in fields(cls)}
        try:
            if given.keys() - known:
                raise ValueError(f"unknown: {', '.join(sorted(given.keys() - known))}")
            given["buckets"] = tuple(Bucket(**each) for each in given["buckets"])
            given["sparse"] = tuple(Table(**each) for each in given.get("sparse", ()))
            given["shapes"] = tuple(tuple(shape) for shape in given.get("shapes", ()))
            given["samples"] = tuple(given.get("samples", ()))
            given["crowd"] = tuple((int(n), float(t)) for n, t in given.get("crowd", ()))
            return cls(**given)
        except (KeyError, TypeError, ValueError) as flaw:
            raise UsageError(f"this is no profile of a model ({flaw}); measure it again.") from None

    @classmethod
    def read(cls, text: str) -> Self:
        """From a file's text."""
        try:
            plain = json.loads(text)
        except ValueError as flaw:
            raise UsageError(f"this is no profile of a model ({flaw}).") from None
        return cls.from_json(plain if isinstance(plain, dict) else {"": plain})
