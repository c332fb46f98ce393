"""The closed forms of a step's cost: sizes in bytes, rates in bytes a second, times in seconds.

ring              2(n-1) a + 2(n-1)/n * S/B
hierarchical      2(g-1)/g * S/B_inside + 2(h-1)/h * S/B_between, and a message for each hop
servers           push = pull = max(S/B_worker, n * S_largest/B_server)
overlap           c_j = max(c_{j-1}, ready_j) + T(S_j)
stragglers        the k-th of n replicas: each measured sample times its chance of being the k-th

`Calibration` has the constants that no formula gives, fitted to measured steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stratagem.errors import UsageError
from stratagem.state.partition import partition


def ring(size: float, n: int, latency: float, rate: float) -> float:
    """Seconds of a ring all-reduce among n."""
    return 2 * (n - 1) * latency + 2 * (n - 1) / n * size / rate


def hierarchical(
    size: float,
    hosts: int,
    per_host: int,
    *,
    inside: tuple[float, float],
    between: tuple[float, float],
) -> float:
    """Seconds of an all-reduce inside each host, then between hosts; pairs are (latency, rate)."""
    return ring(size, per_host, *inside) + ring(size, hosts, *between)


def ring_by_cause(
    size: float, n: int, causes: Mapping[str, tuple[float, float]], longer: float = 1.0
) -> dict[str, float]:
    """Return a ring's seconds by cause; a cause is (seconds of a hop, 0) or (_, bytes a second)."""
    return {
        name: longer * (ring(size, n, 0.0, rate) if rate else ring(0.0, n, hop, 1.0))
        for name, (hop, rate) in causes.items()
    }


def added(*parts: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of each name over all parts."""
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: math.fsum(each.get(name, 0.0) for each in parts) for name in names}


def between(n: int, known: Mapping[int, float], cores: int) -> float:
    """Interpolate the seconds of n replicas from the numbers of replicas that were measured.

    Each replica has a whole number of cores as threads, so 12 replicas on 16 cores take as long as
    16. Between two measurements the load of a thread counts. More replicas than cores take turns.
    """
    if n > cores and n not in known:
        return between(cores, known, cores) * n / cores

    def load(m: int) -> float:
        return max(1.0, m / cores) / max(1, cores // m)

    alike = [m for m in known if load(m) == load(n)]
    if alike:
        return known[min(alike, key=lambda m: abs(m - n))]
    points = sorted((load(m), seconds) for m, seconds in known.items())
    if len(points) == 1:
        return points[0][1]
    right = next((i for i, (at, _) in enumerate(points) if at > load(n)), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, right - 1)], points[max(1, right)]
    return max(y0 + (y1 - y0) * (load(n) - x0) / (x1 - x0), 0.0)


def transfer(size: float, largest: float, workers: float, worker: float, server: float) -> float:
    """Seconds of a push or pull of all workers, by their links or the fullest server's."""
    return max(size / worker, workers * largest / server)


def shared_transfer(alone: float, each: float, others: int, met: float) -> float:
    """Return the mean seconds of a transfer that meets `met` of `others` transfers on average.

    alone   seconds on the worker's own link
    each    seconds on the fullest server's link, for every transfer there

    With several servers one worker cannot use all of a server's link. Other workers make a transfer
    slower, but an idle server makes it no faster, so the average number of workers is not enough:
    the formula sums over their binomial distribution.
    """
    chance = met / others if others else 0.0
    if chance >= 1:
        return max(alone, each * (1 + others))
    took, likely, n = each * (1 + met), (1 - chance) ** others, 0
    while n <= others and each * (1 + n) < alone:  # so few that the worker's own link binds
        took += likely * (alone - each * (1 + n))
        likely *= (others - n) / (n + 1) * chance / (1 - chance)
        n += 1
    return took


def overlapped(parts: Iterable[tuple[float, float]], cost: Callable[[float], float]) -> float:
    """The time at which the last of the (size, ready) parts is sent, one after another."""
    done = 0.0
    for size, ready in parts:
        done = max(done, ready) + cost(size)
    return done


@lru_cache(maxsize=1024)
def largest_share(
    shapes: tuple[tuple[int, ...], ...],
    itemsize: int,
    servers: int,
    parts: tuple[float, ...] = (),
) -> float:
    """The fullest server's share of all bytes; `parts`: the sent fraction of each variable."""
    loads = [0.0] * servers
    for piece in partition(shapes, itemsize, servers):
        part = parts[piece.variable] if parts else 1.0
        loads[piece.server] += piece.size(shapes[piece.variable]) * part
    return max(loads) / sum(loads) if sum(loads) else 1 / servers


@lru_cache(maxsize=4096)
def sampled(k: int, n: int, samples: tuple[float, ...]) -> float:
    """The mean of the k-th smallest of n draws from the samples, with replacement."""
    _check(k, n)
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    edges = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.diff(_at_least(k, n, edges)) @ ordered)


def _at_least(k: int, n: int, chance: np.ndarray) -> np.ndarray:
    """The probability of k successes or more among n."""
    some = np.arange(k, n + 1)
    ways = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in some]
    inside = np.clip(chance[1:-1, None], 1e-300, 1 - 1e-16)
    logs = np.array(ways) + some * np.log(inside) + (n - some) * np.log1p(-inside)
    middle = np.clip(np.exp(logs).sum(1), 0.0, 1.0)
    return np.concatenate([[0.0], middle, [1.0]])


def _check(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise UsageError(f"there is no number {k} among {n} replicas.")


@dataclass(frozen=True)
class Calibration:
    """Constants of this library in seconds and bytes a second, as measured on some machines."""

    #: starting one reduction, or one hop of it, besides the link's latency
    message: float = 120e-6
    #: the same between GPUs: an estimate, never measured on several GPUs
    kernel: float = 20e-6
    #: a step of mirrored replicas: two synchronizations, the notes, the loop
    step: float = 250e-6
    #: a worker's ticket, its push and the answers, besides latency
    exchange: float = 1.2e-3
    #: the part of a link's speed that is left for gradients: 1448 bytes of a frame of 1514
    goodput: float = 0.956
    #: the slowdown of a replica for each other replica on its host
    contention: float = 0.02
    #: a ring over sockets inside one host
    sockets: float = 1.2e9
    #: encryption, whose seconds are added to those of the transfer
    cipher: float = 2e9
    #: servers send values to one group of workers after another: how well that staggers the pushes
    #: (1: only one group pushes at a time)
    turns: float = 0.9
    #: rounding gradients to 16 bits and back
    cast: float = 2e9
    #: how much longer than a ring a 16-bit all-reduce takes among many hosts, since several send to
    #: one; between two hosts it takes no longer
    half: float = 0.35
    #: one operation of a pipeline: a message in, one out, and the code around the layers
    microbatch: float = 300e-6

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
