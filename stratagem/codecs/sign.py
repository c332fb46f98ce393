"""One bit a number: its sign, and for each parameter the mean size of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from stratagem.codecs.compression import Compression, is_small


@dataclass(frozen=True, repr=False)
class Sign(Compression):
    """`mean(abs v) * sign(v)` of each parameter: a thirty-second of the bytes.

    It wants a smaller learning rate. Karimireddy et al. 2019 (1901.09847).
    """

    only_linear: ClassVar[bool] = True

    def room(self, lengths: Sequence[int], itemsize: int) -> int:
        return itemsize * len(lengths) + -(-sum(lengths) // 8)

    def take(self, values: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        if is_small(values):
            self.take_few(values.numpy(), lengths, into.numpy())
            return
        sizes, bits = self._parts(into, lengths, values.dtype)
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
        _add_signed(_unpacked(bits, len(into)), sizes, lengths, into, 1.0)

    def take_few(self, values: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        pieces = torch.from_numpy(np.abs(values)).split_with_sizes(list(lengths))
        sizes = np.array([piece.mean().item() for piece in pieces], values.dtype)
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


def _add_signed(
    up: Tensor, sizes: Tensor, lengths: Sequence[int], into: Tensor, factor: float
) -> None:
    signs = up.to(into.dtype).mul_(2.0).sub_(1.0)
    cut = list(lengths)
    pieces = zip(torch.split(into, cut), torch.split(signs, cut), sizes.tolist(), strict=True)
    for piece, sign, size in pieces:
        piece.add_(sign, alpha=factor * size)


def _packed(up: Tensor) -> Tensor:
    """Eight to a byte, the first in its lowest bit."""
    if not up.is_cuda:
        return torch.from_numpy(np.packbits(up.numpy(), bitorder="little"))
    rows = torch.nn.functional.pad(up.to(torch.uint8), (0, -len(up) % 8)).view(-1, 8)
    return (rows * _powers(up.device)).sum(1, dtype=torch.uint8)


def _unpacked(bits: Tensor, count: int) -> Tensor:
    if not bits.is_cuda:
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=count, bitorder="little"))
    return (bits.unsqueeze(1) & _powers(bits.device)).ne(0).view(-1)[:count]


def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)
