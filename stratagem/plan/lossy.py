"""The cost of gradient compression: bytes by the codecs' formulas, seconds measured here.

A replica's work is timed with the reducer of real trainings (codecs/) over a network that takes no
time: error feedback, encoding, adding up a slice, encoding the sum, decoding. Bytes are counted
from the codec and the shapes of the parameters.
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

#: the compressions to try, by their repr
LOSSY: dict[str, Compression] = {
    repr(record): record for record in (Int8(), TopK(0.01), PowerSGD(), Sign())
}
#: numbers of replicas for which encoding is timed, and rounds: each replica encodes its slice of
#: the sum, too, which is half of the gradient for two replicas, and little for many
_FEW, _MANY, _ROUNDS = 2, 8, 6
#: the most elements to time; times of larger models are extrapolated
_MOST = 4 << 20


@dataclass(frozen=True)
class CodecTime:
    """Seconds in which a replica encodes and decodes a gradient of this model.

    seconds     without its slice of the sum
    whole_sum   to encode the whole sum, of which each replica encodes a slice
    """

    wire: str
    seconds: float
    whole_sum: float = 0.0

    def among(self, replicas: int) -> float:
        """The seconds of each of `replicas` replicas."""
        return self.seconds + self.whole_sum / replicas


class _NoNetwork:
    """A collective without a network, as if every replica sent what this one sends."""

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

    linear: whether the optimizer is SGD; others do not converge with coarse compressions.
    """
    taken = [(name, r) for name, r in LOSSY.items() if linear or not r.only_linear]
    return tuple(_timed(name, record, shapes) for name, record in taken)


def _timed(name: str, record: Compression, shapes: Sequence[tuple[int, ...]]) -> CodecTime:
    few = _seconds(record, shapes, _FEW)
    if isinstance(record, PowerSGD):  # has no slices
        return CodecTime(name, few)
    whole_sum = (few - _seconds(record, shapes, _MANY)) / (1 / _FEW - 1 / _MANY)
    # not below 0, and not above the time for the replica's own gradient
    whole_sum = min(max(whole_sum, 0.0), few / (1 + 1 / _FEW))
    return CodecTime(name, few - whole_sum / _FEW, whole_sum)


def _seconds(record: Compression, shapes: Sequence[tuple[int, ...]], replicas: int) -> float:
    """Time a few steps, and return the fastest; large models are timed in part and extrapolated."""
    layout, whole = _layout(tuple(shapes)), sum(_layout(tuple(shapes)).counts)
    tried, count = 0, 0
    while tried < len(layout.shapes) and (not tried or count + layout.counts[tried] <= _MOST):
        count += layout.counts[tried]
        tried += 1
    part = Layout(layout.names[:tried], layout.shapes[:tried])
    if not isinstance(record, PowerSGD):  # equal slices, so that one can stand for another
        count += -count % replicas
        part = Layout(("all",), ((count,),))
    made = reducer(cast(Collective, _NoNetwork(replicas)), record)
    flat = made.buffer(count, torch.float32, torch.device("cpu"))
    made.lay_out(flat, part)
    dice, best = torch.Generator().manual_seed(0), float("inf")
    for _ in range(_ROUNDS):
        flat.normal_(generator=dice)
        begun = time.perf_counter()
        made.reduce(flat, 1.0 / replicas).wait()  # with a weight, as in trainings
        made.end_step()
        best = min(best, time.perf_counter() - begun)
    return best * whole / max(count, 1)


@lru_cache(maxsize=64)
def _layout(shapes: tuple[tuple[int, ...], ...]) -> Layout:
    return Layout(tuple(map(str, range(len(shapes)))), shapes)


@dataclass(frozen=True)
class Sent:
    """Bytes of a compressed gradient.

    slices   of the slice that is sent to each other replica, and back
    rounds   of each all-reduce
    """

    slices: float = 0.0
    rounds: tuple[float, ...] = ()

    def bytes(self, replicas: int) -> float:
        """The bytes that one replica sends in a step."""
        ring = 2 * (replicas - 1) / replicas * sum(self.rounds)
        return 2 * (replicas - 1) * self.slices + ring


def sent(wire: str, shapes: tuple[tuple[int, ...], ...], itemsize: int, replicas: int) -> Sent:
    """Bytes of a compression, by its key in `LOSSY`."""
    return sent_by(LOSSY[wire], shapes, itemsize, replicas)


@lru_cache(maxsize=1024)
def sent_by(
    record: Compression, shapes: tuple[tuple[int, ...], ...], itemsize: int, replicas: int
) -> Sent:
    """Bytes of a compression, by the formulas of its codec."""
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
