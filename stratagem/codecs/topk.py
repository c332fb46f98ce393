"""Top-k sparsification: the largest numbers of each parameter and their indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from stratagem.codecs.compression import Compression, is_small
from stratagem.errors import UsageError

_STRIDE = 128  # the threshold is estimated from every 128th number
_SMALL = 1 << 14  # below this many numbers no threshold is estimated
_NOWHERE = "a peer has sent numbers for places that there are not"


@dataclass(frozen=True, repr=False)
class TopK(Compression):
    """Sends the largest `share` of each parameter's numbers, in 8 bytes each.

    Momentum is applied here, before the selection, and not by the optimizer:

        u = momentum * u + g;  v = v + u;  send the largest of v, and zero them in v and u

    Args:
        share: 0.01 sends one of a hundred numbers, and at least one of each parameter.
        momentum: of SGD; the optimizer's own must be 0.
        masking: whether the momentum of a number that was sent is zeroed, too.
        clip: the largest norm of the global gradient; each replica clips its own to
            `clip / sqrt(replicas)` before adding its residual.
        dense_steps: how many first steps send every number.

    Lin et al. 2018 (1712.01887).
    """

    share: float
    momentum: float = 0.0
    masking: bool = True
    clip: float | None = None
    only_linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise UsageError(f"{self!r}: share is a part of all numbers: sg.TopK(0.01).")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"{self!r}: momentum is at least 0 and less than 1.")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"{self!r}: clip is a norm greater than 0, or None.")

    def counts(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return how many numbers of each parameter are sent."""
        return _counts(self.share, tuple(lengths))

    def room(self, lengths: Sequence[int], itemsize: int) -> int:
        return (itemsize + 4) * sum(self.counts(lengths))

    def take(self, values: Tensor, lengths: Sequence[int], into: Tensor) -> Tensor:
        if not values.is_cuda:
            return torch.from_numpy(self.take_few(values.numpy(), lengths, into.numpy()))
        counts = self.counts(lengths)
        sent, places = self._parts(into, counts, values.dtype)
        found: list[Tensor] = []
        at = 0
        for length, count in zip(lengths, counts, strict=True):
            found.append(largest(values[at : at + length], count).add_(at))
            at += length
        taken = torch.cat(found) if found else places.long()
        sent.copy_(values[taken])
        places.copy_(taken)
        values[taken] = 0.0
        return taken

    def add(self, wire: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        if is_small(into):
            self.add_few(wire.numpy(), lengths, into.numpy())
            return
        sent, places = self._parts(wire, self.counts(lengths), into.dtype)
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(into):
            raise ValueError(_NOWHERE)
        into.index_add_(0, places, sent)

    def take_few(self, values: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> np.ndarray:
        counts = self.counts(lengths)
        taken = np.empty(sum(counts), np.int64)
        at = filled = 0
        for length, count in zip(lengths, counts, strict=True):
            places = _largest(values[at : at + length], count)
            np.add(places, at, out=taken[filled : filled + count])
            at, filled = at + length, filled + count
        sent = values[taken]
        into[: sent.nbytes] = sent.view(np.uint8)
        into[sent.nbytes : sent.nbytes + 4 * filled] = taken.astype(np.int32).view(np.uint8)
        values[taken] = 0.0
        return taken

    def add_few(self, wire: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        count = sum(self.counts(lengths))
        end = count * into.itemsize
        places = wire[end : end + 4 * count].view(np.uint32)  # -1 is too large
        if count and not places.max() < len(into):
            raise ValueError(_NOWHERE)
        np.add.at(into, places, wire[:end].view(into.dtype))

    @staticmethod
    def _parts(wire: Tensor, counts: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = sum(counts)
        end = count * dtype.itemsize
        return wire[:end].view(dtype), wire[end : end + 4 * count].view(torch.int32)


@lru_cache(maxsize=4096)
def _counts(share: float, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(length, max(1, round(share * length))) for length in lengths)


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` numbers of largest magnitude."""
    if values.is_cuda:
        return values.abs().topk(count, sorted=False).indices
    return torch.from_numpy(_largest(values.numpy(), count)).long()


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    sizes = np.abs(values)
    near = _candidates(sizes, count)
    among = sizes if near is None else sizes[near]
    if len(among) == count:
        picked = np.arange(count)
    else:
        picked = np.argpartition(among, len(among) - count)[len(among) - count :]
    return picked if near is None else near[picked]


def _candidates(sizes: np.ndarray, count: int) -> np.ndarray | None:
    """Return indices that include those of the `count` largest, or None for all indices.

    A sample gives a threshold, below which no number needs to be partitioned: 30 times faster at
    12 million numbers.
    """
    if len(sizes) < _SMALL:
        return None
    sample = sizes[::_STRIDE]
    # a few too many, so that mostly enough pass the threshold
    wanted = int(1.25 * count / len(sizes) * len(sample)) + 4
    if wanted >= len(sample):
        return None
    threshold = np.partition(sample, len(sample) - wanted)[len(sample) - wanted]
    near = np.flatnonzero(sizes >= threshold)
    return near if len(near) >= count else None
