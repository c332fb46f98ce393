"""One bit a number: its sign, and for each parameter the mean size of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from stratagem.codecs.compression import Compression


@dataclass(frozen=True, repr=False)
class Sign(Compression):
    """`mean(abs v) * sign(v)` of each parameter: a thirty-second of the bytes.

    It wants a smaller learning rate. Karimireddy et al. 2019 (1901.09847).
    """

    only_linear: ClassVar[bool] = True

    def room(self, lengths: Sequence[int], itemsize: int) -> int:
        return itemsize * len(lengths) + -(-sum(lengths) // 8)

    def take(self, values: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        sizes, bits = self._parts(into, lengths, values.dtype)
        for size, piece in zip(sizes, torch.split(values, list(lengths)), strict=True):
            size.copy_(piece.abs().mean())
        up = values >= 0
        bits.copy_(_packed(up))
        _add_signed(up, sizes, lengths, values, -1.0)

    def add(self, wire: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        sizes, bits = self._parts(wire, lengths, into.dtype)
        _add_signed(_unpacked(bits, len(into)), sizes, lengths, into, 1.0)

    @staticmethod
    def _parts(wire: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes = dtype.itemsize * len(lengths)
        return wire[:sizes].view(dtype), wire[sizes : sizes + -(-sum(lengths) // 8)]


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
