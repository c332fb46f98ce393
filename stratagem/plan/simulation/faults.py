"""What goes wrong in a simulation, and when.

    Kill(worker=3, at=10.0, back=5.0)     its process ends, and another takes its place 5 s later
    Stall(worker=1, at=4.0, seconds=2.0)  it stands still, and does not know it
    Cut(worker=2, at=7.0, seconds=1.0)    its host is off the network
    ServerDeath(server=0, at=20.0)        the job ends
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from stratagem.errors import UsageError


@dataclass(frozen=True)
class Kill:
    """A worker's process ends; `back` seconds later another takes its place, or nobody does."""

    worker: int
    at: float
    back: float | None = None


@dataclass(frozen=True)
class Stall:
    """A worker stands still for a while."""

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
#: from when to when
Pause = tuple[float, float]


def joined(pauses: list[Pause], begin: float, end: float) -> None:
    """Note one more pause, which began no earlier than the others: one that they touch is theirs.

    Silence is counted from its beginning, however many faults it is made of.
    """
    if pauses and begin <= pauses[-1][1]:
        pauses[-1] = (pauses[-1][0], max(pauses[-1][1], end))
    else:
        pauses.append((begin, end))


def after(start: float, seconds: float, pauses: Sequence[Pause]) -> float:
    """When so many seconds have gone by outside of the pauses, which are in order of time."""
    end = start + seconds
    for begin, until in pauses:
        if begin > end:
            break
        if until > start:
            end += until - max(begin, start)
            start = until
    return end


def check(faults: tuple[Fault, ...], workers: int, servers: int) -> None:
    """Refuse what cannot happen."""
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


def schedule(seed: int, workers: int, until: float, count: int) -> tuple[Fault, ...]:
    """A bad day: so many faults of any worker, at any time; the same ones for the same seed.

    Worker 0 is spared kills without a return, so that somebody is there to end the work.
    """
    dice = random.Random(seed)
    found: list[Fault] = []
    for _ in range(count):
        worker, at = dice.randrange(workers), dice.uniform(0, until)
        length = dice.uniform(0, until / 2)
        kind = dice.choice((Kill, Kill, Stall, Cut))
        if kind is Kill:
            gone = worker and dice.random() < 0.3
            found.append(Kill(worker, at, None if gone else length))
        else:
            found.append(kind(worker, at, length))
    return tuple(sorted(found, key=lambda fault: fault.at))
