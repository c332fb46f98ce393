"""The description of a simulated training, its faults, and its result.

Kill(worker=3, at=10.0, back=5.0)     its process ends, and a new one starts 5 s later
Stall(worker=1, at=4.0, seconds=2.0)  its process stalls, without noticing
Cut(worker=2, at=7.0, seconds=1.0)    its host is off the network
ServerDeath(server=0, at=20.0)        the job ends
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from stratagem.codecs.wire_choice import Wire
from stratagem.errors import UsageError
from stratagem.plan.simulation.spread import Spread
from stratagem.rules.cadence import Sync
from stratagem.rules.stats import Stats
from stratagem.rules.updates import Synchronous, Updates
from stratagem.wire.simulated import Topology


@dataclass(frozen=True)
class Kill:
    """A worker's process ends; `back` seconds later a new one takes its place (None: never)."""

    worker: int
    at: float
    back: float | None = None


@dataclass(frozen=True)
class Stall:
    """A worker's process stalls for a while."""

    worker: int
    at: float
    seconds: float


@dataclass(frozen=True)
class Cut:
    """The host of a worker is off the network for a while."""

    worker: int
    at: float
    seconds: float


@dataclass(frozen=True)
class ServerDeath:
    """A server's process ends."""

    server: int
    at: float


Fault = Kill | Stall | Cut | ServerDeath
#: begin and end
Pause = tuple[float, float]


def joined(pauses: list[Pause], begin: float, end: float) -> None:
    """Append a pause that begins no earlier than the ones before; overlapping pauses are merged.

    So silence counts from its beginning, however many faults cause it.
    """
    if pauses and begin <= pauses[-1][1]:
        pauses[-1] = (pauses[-1][0], max(pauses[-1][1], end))
    else:
        pauses.append((begin, end))


def after(start: float, seconds: float, pauses: Sequence[Pause]) -> float:
    """Return when `seconds` seconds have passed since `start`, without the (sorted) pauses."""
    end = start + seconds
    for begin, until in pauses:
        if begin > end:
            break
        if until > start:
            end += until - max(begin, start)
            start = until
    return end


def _check_faults(faults: tuple[Fault, ...], workers: int, servers: int) -> None:
    """Refuse faults that cannot happen."""
    for fault in faults:
        number, kind, limit = (
            (fault.server, "server", servers)
            if isinstance(fault, ServerDeath)
            else (fault.worker, "worker", workers)
        )
        if not 0 <= number < limit:
            raise UsageError(f"{fault} is about a {kind} that is not there: there are {limit}.")
        lasting = getattr(fault, "seconds", None) or getattr(fault, "back", None) or 0.0
        if not (isfinite(fault.at) and isfinite(lasting)):
            raise UsageError(
                f"{fault} has a time that never comes: give seconds; who is to be gone for good is "
                "a Kill without `back`."
            )
        if fault.at < 0 or lasting < 0:
            raise UsageError(f"{fault} has a time before the beginning.")


def schedule(
    seed: int, workers: int, until: float, count: int, *, chief: bool = False
) -> tuple[Fault, ...]:
    """Draw `count` random faults of workers; a seed gives the same faults again.

    Worker 0 is never killed for good, so that one worker is left to finish. As the `chief` of
    workers that all-reduce it has no faults.
    """
    rng = random.Random(seed)
    found: list[Fault] = []
    for _ in range(count):
        worker, at = rng.randrange(chief and workers > 1, workers), rng.uniform(0, until)
        length = rng.uniform(0, until / 2)
        kind = rng.choice((Kill, Kill, Stall, Cut))
        if kind is Kill:
            gone = worker and rng.random() < 0.3
            found.append(Kill(worker, at, None if gone else length))
        else:
            found.append(kind(worker, at, length))
    return tuple(sorted(found, key=lambda fault: fault.at))


@dataclass(frozen=True)
class Work:
    """What one worker does for one gradient.

    compute   seconds of forward and backward
    push      bytes of its gradient; it pulls as many bytes of values, unless `pull` is given
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
        """Bytes of the new values that a worker pulls."""
        return self.push if self.pull is None else self.pull


@dataclass(frozen=True)
class Overhead:
    """Processor seconds of a step besides computing and updating, at the worker and at servers.

    message   each request and its answer
    byte      each byte of gradients and values
    step      each gradient: the worker's loop, the coordinator's decision

    Meanwhile a worker computes nothing, and a server handles no other request.
    `studies/sparse/overhead.py` measures them on the machine at hand.
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
        """Whether messages cost nothing."""
        return not any(vars(self).values())


@dataclass(frozen=True)
class Regrouping:
    """How replicas that all-reduce go on after a kill or a join: `MirroredStrategy(elastic=True)`.

    seconds   until the present replicas have regrouped
    least     the fewest replicas that go on (min_replicas)
    """

    seconds: float = 0.4
    least: int = 1

    def __post_init__(self) -> None:
        if not (isfinite(self.seconds) and self.seconds >= 0 and self.least >= 1):
            raise UsageError("regrouping takes 0 seconds or more; 1 replica or more is left.")


@dataclass(frozen=True)
class Scenario:
    """One training of `steps` global batches.

    servers    the number of parameter servers; 0: the workers all-reduce
    shards     the part of the bytes that each server keeps; equal parts if not given
    slow       by worker, the factor by which its steps take longer
    patience   seconds of silence after which a worker is lost
    cancels    whether a late worker can stop in the middle of a step
    in_turn    whether servers send values to a few workers at a time, or to all at once
    overhead   processor seconds of messages; none if not given
    elastic    how workers that all-reduce go on after a kill or a join; None: the job ends
    wire, sync the strategy's arguments, for workers that all-reduce
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
    elastic: Regrouping | None = None
    wire: Wire = None
    sync: Sync | None = None

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
        if self.servers and self.elastic is not None:
            raise UsageError(
                "elastic is for workers that all-reduce (servers=0); with servers the others go on "
                "without a worker by themselves."
            )
        if self.servers and (self.wire is not None or self.sync is not None):
            raise UsageError(
                "wire and sync are those of workers that all-reduce (servers=0); with servers say "
                "how many bytes are pushed."
            )
        if not self.patience >= 0:
            raise UsageError(f"patience of a scenario is {self.patience}; it is 0 seconds or more.")
        if not all(0 <= w < self.workers and 0 < times < inf for w, times in self.slow.items()):
            raise UsageError(f"slow names workers 0 to {self.workers - 1}, and times above 0.")
        _check_faults(self.faults, self.workers, self.servers)

    def struck(self, fault: Kill | Stall | Cut) -> range:
        """The workers that a fault affects: for a cut, all workers of the host."""
        if not isinstance(fault, Cut):
            return range(fault.worker, fault.worker + 1)
        first = self.topology.host(fault.worker) * self.topology.per_host
        return range(first, min(self.workers, first + self.topology.per_host))

    @property
    def parts(self) -> tuple[float, ...]:
        """Each server's share of the bytes."""
        whole = sum(self.shards)
        if whole:
            return tuple(shard / whole for shard in self.shards)
        return tuple(1 / self.servers for _ in range(self.servers))

    @property
    def alike(self) -> bool:
        """Whether all servers do the same at the same time, so that one is simulated for all.

        If messages take time, the coordinator has more to do than the other servers.
        """
        same = len(set(self.parts)) == 1 and self.overhead.none
        return same and not self.topology.per_rack


#: an event of the trace: time, kind, worker, and numbers
Event = tuple[float, str, int, tuple[Any, ...]]


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a scenario.

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
        """A short hash of the trace, equal for runs with the same events."""
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()[:16]
