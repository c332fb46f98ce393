"""Compressions as the planner sees them: bytes by their own formulas, seconds as measured here.

What a replica does for a compression in a step is timed with the reducer of real trainings
(codecs/), around a network that takes no time: charge, encode, add up its slice, encode the sum,
decode. What it sends is counted from the codec and the shapes of the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from stratagem.codecs.compression import Compression
from stratagem.codecs.int8 import Int8
from stratagem.codecs.layout import Layout
from stratagem.codecs.low_rank import FactorMemory, PowerSGD
from stratagem.codecs.sign import Sign
from stratagem.codecs.topk import TopK
from stratagem.codecs.two_sided import width
from stratagem.codecs.wire_choice import reducer
from stratagem.wire.collective import Collective, Pending

#: what is tried, by how it is written
LOSSY: dict[str, Compression] = {
    repr(record): record for record in (Int8(), TopK(0.01), PowerSGD(), Sign())
}
#: replicas for which encoding is timed, and how often: each encodes its slice of the sum, too,
#: which is half of the gradient for two, and little for many
_FEW, _MANY, _ROUNDS = 2, 8, 6
#: elements that are tried at most; more take as much longer
_MOST = 4 << 20


@dataclass(frozen=True)
class CodecTime:
    """Seconds in which a replica encodes and decodes one gradient of this model, without its slice
    of the sum; and in which it would encode the whole sum."""

    wire: str
    seconds: float
    whole_sum: float = 0.0

    def among(self, replicas: int) -> float:
        """Of each of so many replicas."""
        return self.seconds + self.whole_sum / replicas


class _NoNetwork:
    """A collective in which what others send is what this replica sends, at once."""

    rank, runs_beside = 0, False

    def __init__(self, size: int = _FEW) -> None:
        self.size = size

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        return Pending()

    def swap(self, rows: Tensor) -> Tensor:
        return rows[self.rank].expand(self.size, -1).contiguous()

    def collect(self, row: Tensor) -> Tensor:
        return row.expand(self.size, -1).contiguous()


def codec_times(shapes: Sequence[tuple[int, ...]], *, linear: bool) -> tuple[CodecTime, ...]:
    """Time every compression on a gradient of these shapes.

    linear: whether the optimizer is SGD; others go astray with the coarse ones.
    """
    taken = [(name, r) for name, r in LOSSY.items() if linear or not r.only_linear]
    return tuple(_timed(name, record, shapes) for name, record in taken)


def _timed(name: str, record: Compression, shapes: Sequence[tuple[int, ...]]) -> CodecTime:
    few = _seconds(record, shapes, _FEW)
    if isinstance(record, PowerSGD):  # has no slices
        return CodecTime(name, few)
    whole_sum = (few - _seconds(record, shapes, _MANY)) / (1 / _FEW - 1 / _MANY)
    # no less than nothing, and no more than the own gradient, which is encoded besides
    whole_sum = min(max(whole_sum, 0.0), few / (1 + 1 / _FEW))
    return CodecTime(name, few - whole_sum / _FEW, whole_sum)


def _seconds(record: Compression, shapes: Sequence[tuple[int, ...]], replicas: int) -> float:
    """The fastest of a few steps; of large models a part, and the rest by its size."""
    layout, whole = _layout(tuple(shapes)), sum(_layout(tuple(shapes)).counts)
    tried, count = 0, 0
    while tried < len(layout.shapes) and (not tried or count + layout.counts[tried] <= _MOST):
        count += layout.counts[tried]
        tried += 1
    part = Layout(layout.names[:tried], layout.shapes[:tried])
    if not isinstance(record, PowerSGD):  # slices that are alike, so that each can be any other
        count += -count % replicas
        part = Layout(("all",), ((count,),))
    made = reducer(cast(Collective, _NoNetwork(replicas)), record)
    flat = made.buffer(count, torch.float32, torch.device("cpu"))
    made.lay_out(flat, part)
    dice, best = torch.Generator().manual_seed(0), float("inf")
    for _ in range(_ROUNDS):
        flat.normal_(generator=dice)
        begun = time.perf_counter()
        made.reduce(flat, 1.0 / replicas).wait()  # weighed, as a share of a batch is
        made.end_step()
        best = min(best, time.perf_counter() - begun)
    return best * whole / max(count, 1)


@lru_cache(maxsize=64)
def _layout(shapes: tuple[tuple[int, ...], ...]) -> Layout:
    return Layout(tuple(map(str, range(len(shapes)))), shapes)


@dataclass(frozen=True)
class Sent:
    """Bytes of a compressed gradient: of a slice that goes to each other replica, and comes back;
    or of numbers that are all-reduced, in so many rounds."""

    slices: float = 0.0
    rounds: tuple[float, ...] = ()

    def bytes(self, replicas: int) -> float:
        """What one replica sends in a step."""
        ring = 2 * (replicas - 1) / replicas * sum(self.rounds)
        return 2 * (replicas - 1) * self.slices + ring


def sent(wire: str, shapes: tuple[tuple[int, ...], ...], itemsize: int, replicas: int) -> Sent:
    """What one of those that are tried sends."""
    return sent_by(LOSSY[wire], shapes, itemsize, replicas)


@lru_cache(maxsize=1024)
def sent_by(
    record: Compression, shapes: tuple[tuple[int, ...], ...], itemsize: int, replicas: int
) -> Sent:
    """By the formulas of the codecs."""
    layout = _layout(shapes)
    if isinstance(record, PowerSGD):
        flat = torch.empty(sum(layout.counts), device="meta")
        memory = FactorMemory(flat, layout, ("residual",), record.rank)
        left = sum(m.rows * m.rank for m in memory.matrices)
        left += sum(end - start for start, end in memory.others)
        right = sum(m.columns * m.rank for m in memory.matrices)
        return Sent(rounds=(left * itemsize, right * itemsize))
    codec = cast(Any, record)
    return Sent(width(codec, layout.slices(replicas), itemsize))
