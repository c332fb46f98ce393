"""One bit a number: its sign, and for each parameter the mean size of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
        at = 0
        for size, length in zip(sizes, lengths, strict=True):
            size.copy_(values[at : at + length].abs().mean())
            at += length
        up = values >= 0
        bits.copy_(_packed(up))
        values.sub_(_signed(up, sizes, lengths))

    def add(self, wire: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        sizes, bits = self._parts(wire, lengths, into.dtype)
        into.add_(_signed(_unpacked(bits, len(into)), sizes, lengths))

    @staticmethod
    def _parts(wire: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes = dtype.itemsize * len(lengths)
        return wire[:sizes].view(dtype), wire[sizes : sizes + -(-sum(lengths) // 8)]


def _signed(up: Tensor, sizes: Tensor, lengths: Sequence[int]) -> Tensor:
    each = sizes.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device=sizes.device))
    return torch.where(up, each, -each)


def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def _packed(up: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(up.to(torch.uint8), (0, -len(up) % 8)).view(-1, 8)
    return (rows * _powers(up.device)).sum(1, dtype=torch.uint8)


def _unpacked(bits: Tensor, count: int) -> Tensor:
    return (bits.unsqueeze(1) & _powers(bits.device)).ne(0).view(-1)[:count]
