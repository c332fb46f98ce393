"""Int8 quantization: each number a multiple of its block's scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stratagem.codecs.compression import Compression, is_small
from stratagem.errors import UsageError

_LEVELS = 127


@dataclass(frozen=True, repr=False)
class Int8(Compression):
    """Quantizes each block of numbers to its scale, `max(abs) / 127`, and a byte a number.

    The error is half a scale at most. It sends a quarter of the bytes, and 4 for each block.
    """

    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise UsageError(f"{self!r}: a block has one number or more: sg.Int8(block=1024).")

    def room(self, lengths: Sequence[int], itemsize: int) -> int:
        count = sum(lengths)
        return 4 * -(-count // self.block) + count

    def take(self, values: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        count = len(values)
        if not count:
            return
        if is_small(values):
            self.take_few(values.numpy(), lengths, into.numpy())
            return
        scales, levels = self._parts(into, count)
        rows = self._rows(values)
        scale = torch.maximum(rows.amax(1), -rows.amin(1)).div_(_LEVELS).float()
        scales.copy_(scale)
        scale = scale.to(values.dtype).unsqueeze(1)
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        rounded = rows.div(divisor).round_().clamp_(-_LEVELS, _LEVELS)
        levels.copy_(rounded.view(-1)[:count])
        values.sub_(rounded.mul_(scale).view(-1)[:count])

    def add(self, wire: Tensor, lengths: Sequence[int], into: Tensor) -> None:
        count = len(into)
        if not count:
            return
        if is_small(into):
            self.add_few(wire.numpy(), lengths, into.numpy())
            return
        scales, levels = self._parts(wire, count)
        each = scales.to(into.dtype).unsqueeze(1)
        into.add_((self._rows(levels).to(into.dtype) * each).view(-1)[:count])

    def take_few(self, values: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        count, rows = len(values), self._filled_up(values, values.dtype)
        scale = (np.maximum(rows.max(1), -rows.min(1)) / _LEVELS).astype(np.float32)
        start = scale.nbytes
        into[:start] = scale.view(np.uint8)
        scale = scale.astype(values.dtype)[:, np.newaxis]
        rounded = np.rint(rows / np.where(scale > 0, scale, np.ones_like(scale)))
        np.clip(rounded, -_LEVELS, _LEVELS, out=rounded)
        with np.errstate(invalid="ignore"):  # casting NaN; the scale is NaN, too
            into[start : start + count].view(np.int8)[:] = rounded.ravel()[:count]
        values -= (rounded * scale).ravel()[:count]

    def add_few(self, wire: np.ndarray, lengths: Sequence[int], into: np.ndarray) -> None:
        count = len(into)
        start = 4 * -(-count // self.block)
        scale = wire[:start].view(np.float32).astype(into.dtype)
        rows = self._filled_up(wire[start : start + count].view(np.int8), into.dtype)
        rows *= scale[:, np.newaxis]
        into += rows.ravel()[:count]

    def _filled_up(self, flat: np.ndarray, dtype: np.dtype) -> np.ndarray:
        rows = np.zeros((-(-len(flat) // self.block), self.block), dtype)
        rows.ravel()[: len(flat)] = flat
        return rows

    def _parts(self, wire: Tensor, count: int) -> tuple[Tensor, Tensor]:
        scales = 4 * -(-count // self.block)
        return wire[:scales].view(torch.float32), wire[scales : scales + count].view(torch.int8)

    def _rows(self, flat: Tensor) -> Tensor:
        """Return a row for each block, the last one padded with zeros."""
        missing = -len(flat) % self.block
        if not missing:
            return flat.view(-1, self.block)
        return torch.nn.functional.pad(flat, (0, missing)).view(-1, self.block)
