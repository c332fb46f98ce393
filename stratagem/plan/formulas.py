"""The closed forms of a step's cost: sizes in bytes, rates in bytes a second, times in seconds.

    ring              2(n-1) a + 2(n-1)/n * S/B
    hierarchical      2(g-1)/g * S/B_inside + 2(h-1)/h * S/B_between, and a message for each hop
    servers           push = pull = max(S/B_worker, n * S_largest/B_server)
    overlap           c_j = max(c_{j-1}, ready_j) + T(S_j)
    sparse rows       U = sum over rows of 1 - (1-p)^batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

from stratagem.state.partition import partition


def ring(size: float, n: int, latency: float, rate: float) -> float:
    """An all-reduce in a circle of n."""
    return 2 * (n - 1) * latency + 2 * (n - 1) / n * size / rate


def hierarchical(
    size: float, hosts: int, per_host: int, *, inside: tuple[float, float],
    between: tuple[float, float],
) -> float:  # fmt: skip
    """Inside every host, then between their leaders; each pair is (latency, rate)."""
    return ring(size, per_host, *inside) + ring(size, hosts, *between)


def transfer(size: float, largest: float, workers: float, worker: float, server: float) -> float:
    """A push or a pull of all workers: theirs or the fullest server's link, whichever is slower."""
    return max(size / worker, workers * largest / server)


def overlapped(
    parts: Iterable[tuple[float, float]], cost: Callable[[float], float], start: float = 0.0
) -> float:
    """When the last of (size, ready) has been carried, one after the other."""
    done = start
    for size, ready in parts:
        done = max(done, ready) + cost(size)
    return done


def knee(compute: float, servers: int, rate: float, size: float) -> float:
    """The number of workers from which servers take longer than computing, nothing overlapping."""
    return compute * servers * rate / (2 * size)


def rows_touched(chances: Iterable[float], batch: int) -> float:
    """Rows that a batch touches, each with its chance of being in one example."""
    return math.fsum(-math.expm1(batch * math.log1p(-min(p, 1 - 1e-16))) for p in chances)


@lru_cache(maxsize=1024)
def largest_share(
    shapes: tuple[tuple[int, ...], ...], itemsize: int, servers: int,
    parts: tuple[float, ...] = (),
) -> float:  # fmt: skip
    """Of all that travels, what the fullest server takes; `parts`: of each variable, if not all."""
    loads = [0.0] * servers
    for piece in partition(shapes, itemsize, servers):
        part = parts[piece.variable] if parts else 1.0
        loads[piece.server] += piece.size(shapes[piece.variable]) * part
    return max(loads) / sum(loads) if sum(loads) else 1 / servers


