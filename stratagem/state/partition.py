"""Variables cut into pieces and laid onto servers.

A variable is cut along axis 0 only, into shares that differ by one row at most; a scalar is never
cut. The largest server is the bottleneck of every push and pull, so pieces are placed to keep it as
small as can be:

    variable 0  [ rows 0..2 | 3..5 | 6..8 | 9..10 | 11..12 ]      13 rows, 5 shards
    variable 1  [ . ]
    server 0 <- (0, 0..2) (0, 9..10) (1)     server 1 <- (0, 3..5) ...

    partition([(13, 4), ()], itemsize=4, servers=2, partitioner=FixedShards(5))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stratagem.errors import UsageError

Shape = tuple[int, ...]

#: servers this close to their mean are even, and no more than so many steps are spent on it
_EVEN, _STEPS = 1.001, 64


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of axis 0 of a variable, and the server that holds them."""

    variable: int
    start: int
    stop: int
    server: int

    def shape(self, whole: Sequence[int]) -> Shape:
        """Of the piece, in a variable of this shape; a scalar stays one."""
        return (self.stop - self.start, *whole[1:]) if whole else ()

    def size(self, whole: Sequence[int]) -> int:
        """Elements of the piece, in a variable of this shape."""
        return math.prod(self.shape(whole))

    def is_whole(self, whole: Sequence[int]) -> bool:
        return not whole or self.stop - self.start == whole[0]

    def to_json(self) -> list[int]:
        return [self.variable, self.start, self.stop, self.server]

    @classmethod
    def from_json(cls, data: Sequence[int]) -> Piece:
        if len(data) != 4 or not all(type(n) is int and n >= 0 for n in data):
            raise UsageError(f"a piece is [variable, start, stop, server], not {data!r}.")
        return cls(*data)


@dataclass(frozen=True)
class FixedShards:
    """Every variable in `n` shards, or as many as it has rows."""

    n: int

    def __post_init__(self) -> None:
        _positive("FixedShards(n)", self.n)

    def shards(self, shape: Sequence[int], itemsize: int) -> int:
        return max(1, min(_rows(shape), self.n))


@dataclass(frozen=True)
class MinSize:
    """As many shards as can be, none smaller than about `min_bytes`, at most `max_shards`."""

    min_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _positive("MinSize(min_bytes)", self.min_bytes)
        _positive("MinSize(max_shards)", self.max_shards)

    def shards(self, shape: Sequence[int], itemsize: int) -> int:
        size = math.prod(shape) * itemsize
        return max(1, min(_rows(shape), self.max_shards, -(-size // self.min_bytes)))


@dataclass(frozen=True)
class MaxSize:
    """As few shards as can be, none larger than `max_bytes` (a row is never cut)."""

    max_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _positive("MaxSize(max_bytes)", self.max_bytes)
        if self.max_shards is not None:
            _positive("MaxSize(max_shards)", self.max_shards)

    def shards(self, shape: Sequence[int], itemsize: int) -> int:
        rows, row = _rows(shape), math.prod(shape[1:]) * itemsize
        shards = -(-rows // max(1, self.max_bytes // row)) if row else 1
        return max(1, min(rows, shards, self.max_shards or shards))


Partitioner = FixedShards | MinSize | MaxSize

def partition(
    shapes: Sequence[Sequence[int]],
    itemsize: int,
    servers: int,
    partitioner: Partitioner | None = None,
    *,
    whole: bool = False,
) -> tuple[Piece, ...]:
    """Cut every variable and place the pieces; the same arguments give the same answer anywhere.

    Pieces come in the order of their variables and rows. `whole` never cuts: for optimizers that
    look at whole variables (`recipe.elementwise` says which do not).
    """
    _positive("servers", servers)
    partitioner = partitioner or MinSize(max_shards=servers)
    cuts = [
        (variable, start, stop)
        for variable, shape in enumerate(shapes)
        for start, stop in _shares(
            _rows(shape), 1 if whole or not shape else partitioner.shards(shape, itemsize)
        )
    ]
    sizes = [(stop - start) * math.prod(shapes[v][1:]) for v, start, stop in cuts]
    return tuple(
        Piece(*cut, server) for cut, server in zip(cuts, place(sizes, servers), strict=True)
    )


def place(sizes: Sequence[int], servers: int) -> list[int]:
    """A server for every size: the largest first onto the emptiest, then evened out."""
    homes, loads = [0] * len(sizes), [0] * servers
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        homes[i] = min(range(servers), key=lambda s: (loads[s], s))
        loads[homes[i]] += sizes[i]
    for _ in range(_STEPS):
        if max(loads) * servers <= sum(loads) * _EVEN or not _even_out(sizes, homes, loads):
            break
    return homes


def _even_out(sizes: Sequence[int], homes: list[int], loads: list[int]) -> bool:
    """Move one piece off the fullest server, or swap it for a smaller one, if that empties it.

    Of all such steps the one that leaves the fuller of the two servers emptiest.
    """
    full = max(range(len(loads)), key=lambda s: (loads[s], -s))
    here = {sizes[i]: i for i in reversed(range(len(sizes))) if homes[i] == full and sizes[i]}
    there = {(homes[j], sizes[j]): j for j in reversed(range(len(sizes))) if homes[j] != full}
    best = loads[full]
    step: tuple[int, int, int | None] | None = None
    for size, i in here.items():
        for server in range(len(loads)):
            fuller = max(loads[full] - size, loads[server] + size)
            if server != full and fuller < best:
                best, step = fuller, (i, server, None)
        for (server, other), j in there.items():
            fuller = max(loads[full] - size + other, loads[server] + size - other)
            if fuller < best:
                best, step = fuller, (i, server, j)
    if step is None:
        return False
    leaves, server, comes = step
    moved = sizes[leaves] - (sizes[comes] if comes is not None else 0)
    homes[leaves] = server
    if comes is not None:
        homes[comes] = full
    loads[full] -= moved
    loads[server] += moved
    return True


def _shares(rows: int, shards: int) -> list[tuple[int, int]]:
    small, more = divmod(rows, shards)
    edges = [i * small + min(i, more) for i in range(shards + 1)]
    return list(pairwise(edges))


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _positive(what: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{what} must be a whole number from 1 on, not {value!r}.")
