"""A simulated training: what is computed where and under which rule, and what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from stratagem.errors import UsageError
from stratagem.plan.simulation import faults as bad
from stratagem.plan.simulation.faults import Cut, Fault, Kill, Stall
from stratagem.plan.simulation.spread import Spread
from stratagem.rules.stats import Stats
from stratagem.rules.updates import Synchronous, Updates
from stratagem.wire.simulated import Topology


@dataclass(frozen=True)
class Work:
    """What one worker does for one gradient.

    compute   seconds of forward and backward
    push      bytes of its gradient; what it fetches is as large, unless `pull` says otherwise
    update    seconds that one server would need to update all parameters; `add` to add a gradient
    buckets   (part of the bytes, ready after which part of the computation), first to last
    """

    compute: Spread
    push: float = 0.0
    pull: float | None = None
    update: float = 0.0
    add: float = 0.0
    buckets: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def __post_init__(self) -> None:
        numbers = (self.push, self.pull or 0.0, self.update, self.add)
        if not all(isfinite(n) and n >= 0 for n in numbers):
            raise UsageError("bytes and seconds of the work are numbers of 0 or more.")
        if abs(sum(part for part, _ in self.buckets) - 1.0) > 1e-6 or not all(
            part >= 0 and 0 <= ready <= 1 for part, ready in self.buckets
        ):
            raise UsageError(
                "buckets are pairs (part of the bytes, ready after which part of the computation), "
                "all parts together 1; as [(0.5, 0.6), (0.5, 1.0)]."
            )

    @property
    def fetched(self) -> float:
        """Bytes of new values."""
        return self.push if self.pull is None else self.pull


@dataclass(frozen=True)
class Overhead:
    """Processor seconds of a step besides computing and updating, at the worker and at servers.

    message   each request and its answer
    byte      each byte of gradients and values
    step      each gradient: the worker's loop around it, the lead's judging it

    A worker computes nothing meanwhile, and a server serves nobody else. `plan.overhead.measure`
    finds them on the machine at hand.
    """

    worker_message: float = 0.0
    server_message: float = 0.0
    worker_byte: float = 0.0
    server_byte: float = 0.0
    worker_step: float = 0.0
    server_step: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isfinite(value) and value >= 0):
                raise UsageError(f"{name} of the overhead is a number of seconds, 0 or more.")

    @property
    def none(self) -> bool:
        """Whether nothing costs anything."""
        return not any(vars(self).values())


@dataclass(frozen=True)
class Scenario:
    """One training of `steps` global batches.

    servers    how many keep the parameters; 0: the workers all-reduce among themselves
    shards     the part of the bytes that each server keeps; as even as can be if not given
    slow       workers that always take so many times as long
    patience   seconds of silence after which a worker is given up
    cancels    whether a late worker can stop in the middle of a step
    in_turn    whether servers send values in turn, or to all who ask at once
    overhead   what messages cost processors; nothing if not given
    """

    workers: int
    steps: int
    work: Work
    topology: Topology
    updates: Updates = field(default_factory=Synchronous)
    servers: int = 1
    shards: tuple[float, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    patience: float = 60.0
    cancels: bool = True
    in_turn: bool = True
    seed: int = 0
    overhead: Overhead = Overhead()

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("steps", 1), ("servers", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{name} of a scenario is a whole number of at least {least}.")
        finite = all(0 <= shard < inf for shard in self.shards)
        if self.shards and (len(self.shards) != self.servers or not finite):
            raise UsageError(f"shards names the part of each of the {self.servers} servers.")
        if not self.servers and self.updates != Synchronous():
            raise UsageError(
                "without servers all workers step together: servers=1 or more for other updates."
            )
        if not self.servers and not self.overhead.none:
            raise UsageError(
                "overhead is that of messages with servers; where workers all-reduce put it into "
                "the latency of the topology."
            )
        if not self.patience >= 0:
            raise UsageError(f"patience of a scenario is {self.patience}; it is 0 seconds or more.")
        if not all(0 <= w < self.workers and 0 < times < inf for w, times in self.slow.items()):
            raise UsageError(f"slow names workers 0 to {self.workers - 1}, and times above 0.")
        bad.check(self.faults, self.workers, self.servers)

    def struck(self, fault: Kill | Stall | Cut) -> range:
        """The workers that a fault is about: a cut takes all of a host off the network."""
        if not isinstance(fault, Cut):
            return range(fault.worker, fault.worker + 1)
        first = self.topology.host(fault.worker) * self.topology.per_host
        return range(first, min(self.workers, first + self.topology.per_host))

    @property
    def parts(self) -> tuple[float, ...]:
        """The part of the bytes that each server keeps."""
        whole = sum(self.shards)
        if whole:
            return tuple(shard / whole for shard in self.shards)
        return tuple(1 / self.servers for _ in range(self.servers))

    @property
    def alike(self) -> bool:
        """Whether all servers have the same to do at the same time: one stands for all.

        Where messages cost something the lead has more to do than the others.
        """
        same = len(set(self.parts)) == 1 and self.overhead.none
        return same and not self.topology.per_rack


#: one thing that happened: when, what, to which worker, and the numbers of it
Event = tuple[float, str, int, tuple[Any, ...]]


@dataclass(frozen=True)
class Run:
    """What came of a scenario.

    seconds   until the last update was made
    updates   when each was made
    failure   why the training could not go on, in a sentence; empty if it did
    """

    seconds: float
    updates: tuple[float, ...]
    stats: Stats
    trace: tuple[Event, ...] = ()
    failure: str = ""

    @property
    def rate(self) -> float:
        """Updates per second."""
        return len(self.updates) / self.seconds if self.seconds else 0.0

    @property
    def digest(self) -> str:
        """A short name of the trace: two runs with the same one did the same."""
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()[:16]
