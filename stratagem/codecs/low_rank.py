"""PowerSGD: matrices as products of two thin ones, by one step of the power method."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.codecs.compression import Compression
from stratagem.codecs.feedback import Feedback, Kept, Memory, finite
from stratagem.codecs.layout import Layout
from stratagem.errors import UsageError
from stratagem.wire.collective import Collective


@dataclass(frozen=True, repr=False)
class PowerSGD(Compression):
    """Sends each weight of two or more dimensions, n x m, as n x `rank` and m x `rank` numbers.

        P = orthogonal(sum of M Q);  Q = sum of M' P;  gradient = P Q'

    The next step starts from Q. Parameters of one dimension, and weights that would not get
    smaller, travel as they are. Vogels et al. 2019 (1905.13727).
    """

    rank: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise UsageError(f"{self!r}: a rank is 1 or more: sg.PowerSGD(rank=4).")


@dataclass
class _Matrix:
    """A parameter that travels as two factors, and its place in the flat gradient."""

    name: str
    start: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        end = self.start + self.rows * self.columns
        return flat[self.start : end].view(self.rows, self.columns)


class FactorMemory(Memory):
    """A memory with the second factor of each matrix.

    `factors`, `new_factors` and `earlier_factors` are what `Carried` calls kept, draft and before;
    as no factor is written in place, lists change hands and no buffers are needed.
    """

    def __init__(self, flat: Tensor, layout: Layout, names: Sequence[str], rank: int) -> None:
        super().__init__(flat, layout, names)
        self.matrices: list[_Matrix] = []
        #: start and end of each parameter that travels as it is
        self.others: list[tuple[int, int]] = []
        at = 0
        for name, shape, count in zip(layout.names, layout.shapes, layout.counts, strict=True):
            rows = shape[0] if len(shape) > 1 else 0
            columns = math.prod(shape[1:])
            thin = min(rank, rows, columns)
            if thin and thin * (rows + columns) < count:
                self.matrices.append(_Matrix(name, at, rows, columns, thin))
            elif count:
                self.others.append((at, at + count))
            at += count
        like = self.residual.kept
        self.factors = [_first(matrix, like) for matrix in self.matrices]
        self.new_factors = self.earlier_factors = self.factors

    def settle(self, spoilt: bool) -> None:
        super().settle(spoilt)
        self.earlier_factors = self.factors
        if not spoilt:
            self.factors = self.new_factors

    def undo(self) -> None:
        super().undo()
        self.factors = self.new_factors = self.earlier_factors


class LowRank(Feedback):
    """The reducer of PowerSGD: an all-reduce for each of the two factors."""

    def __init__(self, collective: Collective, record: PowerSGD) -> None:
        super().__init__(collective, record)
        self.rank = record.rank
        self._packs: dict[tuple[int, str], Tensor] = {}

    def memory(self, flat: Tensor, layout: Layout) -> FactorMemory:
        made = FactorMemory(flat, layout, self.keeps, self.rank)
        left = sum(m.rows * m.rank for m in made.matrices)
        left += sum(end - start for start, end in made.others)
        right = sum(m.columns * m.rank for m in made.matrices)
        like = made.residual.kept
        for side, count in (("left", left), ("right", right)):
            pack = self.collective.buffer(count, like.dtype, like.device)
            self._packs[flat.data_ptr(), side] = pack
        return made

    def _reduce(self, memory: Memory, weight: float) -> None:
        """Apply the weight while adding the residual, which saves a pass over memory. Numbers that
        are not finite make a factor so, and all replicas see that."""
        if self.steps < self.record.dense_steps:
            super()._reduce(memory, weight)
            return
        assert isinstance(memory, FactorMemory)
        kept, draft = memory.residual.kept, memory.residual.draft
        if weight:
            torch.add(kept, memory.flat, alpha=weight, out=draft)
        else:
            draft.copy_(kept)
        left, right = (self._packs[memory.flat.data_ptr(), side] for side in ("left", "right"))
        thin = [m.of(draft) @ q for m, q in zip(memory.matrices, memory.factors, strict=True)]
        _pack([*thin, *(draft[a:b] for a, b in memory.others)], left)
        if left.numel():
            self.collective.all_reduce(left).wait()
        if not finite(left):
            memory.spoilt = True
            return
        bases = [orthogonal(p) for p in _unpack(left, thin)]
        own = [p.T @ m.of(draft) for m, p in zip(memory.matrices, bases, strict=True)]
        if own:
            _pack(own, right)
            self.collective.all_reduce(right).wait()
        memory.spoilt = not finite(right)
        sums = _unpack(right, own)
        found = zip(sums, memory.factors, strict=True)
        memory.new_factors = [_begin_with(q.T, before) for q, before in found]
        self._write(memory, bases, own, sums, left[sum(p.numel() for p in thin) :])

    def _write(
        self,
        memory: FactorMemory,
        bases: list[Tensor],
        own: list[Tensor],
        sums: list[Tensor],
        others: Tensor,
    ) -> None:
        """Write the gradient, and subtract what this replica has sent from the draft."""
        draft = memory.residual.draft
        for i, matrix in enumerate(memory.matrices):
            into = matrix.of(memory.flat)
            if into.dtype is draft.dtype:
                torch.mm(bases[i], sums[i], out=into)
            else:
                into.copy_(bases[i] @ sums[i])
            matrix.of(draft).addmm_(bases[i], own[i], alpha=-1.0)
        at = 0
        for start, end in memory.others:
            memory.flat[start:end].copy_(others[at : at + end - start])
            draft[start:end].zero_()
            at += end - start

    # --- checkpoints --------------------------------------------------------------------------

    def saved(self, memory: Memory) -> Kept:
        assert isinstance(memory, FactorMemory)
        both = zip(memory.matrices, memory.factors, strict=True)
        return {**super().saved(memory), "factors": {m.name: q.cpu().clone() for m, q in both}}

    def restore(self, memory: Memory, kept: Kept) -> None:
        assert isinstance(memory, FactorMemory)
        super().restore(memory, kept)
        for i, matrix in enumerate(memory.matrices):
            found = kept.get("factors", {}).get(matrix.name)
            if found is not None and found.shape == memory.factors[i].shape:
                memory.factors[i] = found.to(memory.factors[i])
        memory.new_factors = memory.factors


def _first(matrix: _Matrix, like: Tensor) -> Tensor:
    """Draw the first factor, seeded by the parameter's name: the same on every replica."""
    dice = torch.Generator().manual_seed(zlib.crc32(matrix.name.encode()))
    drawn = torch.randn(matrix.columns, matrix.rank, generator=dice, dtype=torch.float64)
    return drawn.to(like)


def _begin_with(found: Tensor, before: Tensor) -> Tensor:
    """Return the next step's factor; a column of zeros, which would stay zero, is replaced."""
    return torch.where(found.any(0), found, before).contiguous()


def orthogonal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns; some basis even if they are all zero."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _pack(tensors: Sequence[Tensor], into: Tensor) -> None:
    at = 0
    for tensor in tensors:
        into[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
        at += tensor.numel()


def _unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    found, at = [], 0
    for tensor in like:
        found.append(flat[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
    return found
