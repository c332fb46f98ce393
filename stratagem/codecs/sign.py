"""Sign compression: one bit a number, and the mean magnitude of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from stratagem.codecs.compression import Compression, is_small

#: numbers that are encoded at a time, so that they and the results fit into a cache
_AT_ONCE = 1 << 15
#: for each byte its eight bits, the lowest first, as 1 and -1
_SIGNS = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") - 1


@dataclass(frozen=True, repr=False)
class Sign(Compression):
    """Sends `mean(abs v) * sign(v)` of each parameter: a thirty-second of the bytes.

    It needs a smaller learning rate. Karimireddy et al. 2019 (1901.09847).
    """

    only_linear: ClassVar[bool] = True

    def room(self, lengths: Sequence[int], itemsize: int) -> int:
        return itemsize * len(lengths) + -(-sum(lengths) // 8)

    def take(self, values: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        if is_small(values):
            self.take_few(values.numpy(), lengths, into.numpy())
            return
        sizes, bits = self._parts(into, lengths, values.dtype)
        if not values.is_cuda:
            _take(values.numpy(), lengths, sizes.numpy(), bits.numpy())
            return
        pieces = values.abs().split_with_sizes(list(lengths))
        for size, piece in zip(sizes.unbind(), pieces, strict=True):
            torch.mean(piece, 0, out=size)
        up = values >= 0
        bits.copy_(_packed(up))
        _add_signed(up, sizes, lengths, values, -1.0)

    def add(self, wire: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        if is_small(into):
            self.add_few(wire.numpy(), lengths, into.numpy())
            return
        sizes, bits = self._parts(wire, lengths, into.dtype)
        if not into.is_cuda:
            _add(bits.numpy(), lengths, sizes.numpy(), into.numpy())
            return
        _add_signed(_unpacked(bits, len(into)), sizes, lengths, into, 1.0)

    def take_few(self, values: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        sums = [float(np.abs(values[start:end]).sum()) for start, end in _spans(lengths)]
        sizes = np.array([s / max(n, 1) for s, n in zip(sums, lengths, strict=True)], values.dtype)
        up = values >= 0
        bits = np.packbits(up, bitorder="little")
        into[: sizes.nbytes] = sizes.view(np.uint8)
        into[sizes.nbytes : sizes.nbytes + len(bits)] = bits
        values -= _signed(up, sizes, lengths)

    def add_few(self, wire: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        start = into.itemsize * len(lengths)
        bits = wire[start : start + -(-len(into) // 8)]
        up = np.unpackbits(bits, count=len(into), bitorder="little")
        into += _signed(up, wire[:start].view(into.dtype), lengths)

    @staticmethod
    def _parts(wire: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes = dtype.itemsize * len(lengths)
        return wire[:sizes].view(dtype), wire[sizes : sizes + -(-sum(lengths) // 8)]


def _signed(up: np.ndarray, sizes: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    signed = np.repeat(sizes, lengths)
    return np.where(up, signed, -signed)


def _take(values: np.ndarray, lengths: Sequence[int], sizes: np.ndarray, bits: np.ndarray) -> None:
    """`take` on the CPU, in parts that fit into its cache."""
    for at, (start, end) in enumerate(_spans(lengths)):
        parts = range(start, end, _AT_ONCE)
        total = sum(float(np.abs(values[i : min(end, i + _AT_ONCE)]).sum()) for i in parts)
        sizes[at] = total / max(end - start, 1)
    for i in range(0, len(values), _AT_ONCE):
        up = np.packbits(values[i : i + _AT_ONCE] >= 0, bitorder="little")
        bits[i // 8 : i // 8 + len(up)] = up
    _add(bits, lengths, -sizes, values)


def _add(bits: np.ndarray, lengths: Sequence[int], sizes: np.ndarray, into: np.ndarray) -> None:
    """`add` on the CPU: a table turns each byte into eight numbers."""
    signs = _SIGNS.astype(into.dtype)
    for size, (start, end) in zip(sizes, _spans(lengths), strict=True):
        table = signs * size
        for i in range(start, end, _AT_ONCE):
            last = min(end, i + _AT_ONCE)
            found = table.take(bits[i // 8 : -(-last // 8)], axis=0).reshape(-1)
            into[i:last] += found[i % 8 : i % 8 + last - i]


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each parameter."""
    ends = list(accumulate(lengths))
    return zip([0, *ends], ends, strict=False)


def _add_signed(
    up: Tensor, sizes: Tensor, lengths: Sequence[int], into: Tensor, factor: float
) -> None:
    signs = up.to(into.dtype).mul_(2.0).sub_(1.0)
    cut = list(lengths)
    pieces = zip(torch.split(into, cut), torch.split(signs, cut), sizes.tolist(), strict=True)
    for piece, sign, size in pieces:
        piece.add_(sign, alpha=factor * size)


def _packed(up: Tensor) -> Tensor:
    """Pack eight bits into a byte, the first one lowest."""
    rows = torch.nn.functional.pad(up.to(torch.uint8), (0, -len(up) % 8)).view(-1, 8)
    return (rows * _powers(up.device)).sum(1, dtype=torch.uint8)


def _unpacked(bits: Tensor, count: int) -> Tensor:
    return (bits.unsqueeze(1) & _powers(bits.device)).ne(0).view(-1)[:count]


def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)
