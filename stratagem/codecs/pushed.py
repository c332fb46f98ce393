"""Compressed pushes of a worker's gradient to parameter servers, piece by piece.

    worker   residual + gradient -> encoded pieces; the new residual stays
    server   bytes of a piece    -> numbers, summed by the server's rules

Each piece is encoded by itself as soon as backward has made it, to the same number of bytes every
time. If a push is dropped, because it came too late, the residual stays as it was before it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.compression import Compression, SliceCodec
from stratagem.codecs.feedback import Kept, finite, shared_out
from stratagem.codecs.int8 import Int8
from stratagem.codecs.low_rank import PowerSGD, orthogonal
from stratagem.codecs.sign import Sign
from stratagem.codecs.topk import TopK
from stratagem.errors import UsageError

_ALIGNED = 8  # bytes, so that numbers of any type may stand at the start of a piece


def check_pushed(record: Compression) -> None:
    """Raise UsageError for a compression that pushes do not support."""
    if isinstance(record, TopK) and record.clip is not None:
        raise UsageError(
            f"wire={record!r} clips by the norm of the whole gradient, and pieces of it leave for "
            "the servers while others are made; leave clip out, and clip where the sum is: "
            "compile(clip_norm=...)."
        )
    if not isinstance(record, Int8 | TopK | Sign | PowerSGD):
        raise UsageError(f"wire={record!r} cannot be pushed; use one of stratagem's records.")


def _thin(record: PowerSGD, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return rows, columns and rank of a piece, or None if two factors are no smaller."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
    rank = min(record.rank, rows, columns)
    return (rows, columns, rank) if rank and rank * (rows + columns) < rows * columns else None


def piece_bytes(record: Compression, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of an encoded piece of this shape."""
    count = math.prod(shape)
    if isinstance(record, PowerSGD):
        thin = _thin(record, shape)
        size = itemsize * (count if thin is None else thin[2] * (thin[0] + thin[1]))
    else:
        size = _slices(record).room([count] if count else [], itemsize)
    return -(-size // _ALIGNED) * _ALIGNED


def decode_piece(record: Compression, wire: Tensor, shape: Sequence[int], into: Tensor) -> None:
    """Decode a piece into flat memory; ValueError if the bytes are invalid."""
    into.zero_()
    count = math.prod(shape)
    if not isinstance(record, PowerSGD):
        if count:
            _slices(record).add(wire, [count], into)
        return
    numbers, thin = wire.view(into.dtype), _thin(record, shape)
    if thin is None:
        into.copy_(numbers[:count])
        return
    rows, columns, rank = thin
    left, right = numbers[: rows * rank], numbers[rows * rank : (rows + columns) * rank]
    torch.mm(left.view(rows, rank), right.view(columns, rank).T, out=into.view(rows, columns))


def _slices(record: Compression) -> SliceCodec:
    assert isinstance(record, Int8 | TopK | Sign)
    return record


class PushFeedback:
    """The residuals of one worker, by variable: a push writes drafts, `settle` keeps them."""

    def __init__(
        self, record: Compression, names: Sequence[str], tensors: Sequence[Tensor]
    ) -> None:
        self.record, self.names = record, list(names)
        self._like, self.pushes = list(tensors), 0
        self._momentum = record.momentum if isinstance(record, TopK) else 0.0
        keeps = ("residual", "momentum") if self._momentum else ("residual",)
        self._kept: dict[str, list[Tensor | None]] = {k: [None] * len(names) for k in keeps}
        self._draft: dict[str, list[Tensor | None]] = {k: [None] * len(names) for k in keeps}
        self._drafted: set[int] = set()
        self._spoilt = False
        #: by variable and first row: the rows of a sparse gradient, and their new residual
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        #: by variable and first element of a piece: the factor that PowerSGD starts from
        self._factors: dict[tuple[int, int], Tensor] = {}
        self._new_factors: dict[tuple[int, int], Tensor] = {}

    @property
    def dense(self) -> bool:
        """Whether the next push sends every number."""
        return self.pushes < self.record.dense_steps

    def _memory(self, of: dict[str, list[Tensor | None]], name: str, variable: int) -> Tensor:
        found = of[name][variable]
        if found is None:
            like = self._like[variable]
            found = of[name][variable] = torch.zeros(
                like.numel(), dtype=like.dtype, device=like.device
            )
        return found

    def charge(self, variable: int, flat: Tensor) -> Tensor:
        """Return the draft of a variable: its gradient plus its residual."""
        draft = self._memory(self._draft, "residual", variable)
        draft.copy_(self._memory(self._kept, "residual", variable))
        if self._momentum:
            moved = self._memory(self._draft, "momentum", variable)
            before = self._memory(self._kept, "momentum", variable)
            flat = torch.mul(before, self._momentum, out=moved).add_(flat)
        draft.add_(flat)
        if not finite(draft):
            self._spoilt = True
            draft.fill_(math.nan)  # a compression may drop a single NaN
        self._drafted.add(variable)
        return draft

    def encode(self, variable: int, start: int, shape: Sequence[int], into: Tensor) -> None:
        """Encode the piece that begins at element `start`; the draft keeps the residual."""
        count = math.prod(shape)
        values = self._memory(self._draft, "residual", variable)[start : start + count]
        wire = (
            into if into.device == values.device else torch.empty_like(into, device=values.device)
        )
        if isinstance(self.record, PowerSGD):
            self._factor((variable, start), values, shape, wire)
        elif count:
            taken = _slices(self.record).take(values, [count], wire)
            if taken is not None and self._momentum and _masks(self.record):
                moved = self._memory(self._draft, "momentum", variable)
                moved[start : start + count][taken] = 0.0
        if wire is not into:
            into.copy_(wire)

    def _factor(
        self, key: tuple[int, int], values: Tensor, shape: Sequence[int], wire: Tensor
    ) -> None:
        assert isinstance(self.record, PowerSGD)
        numbers, thin = wire.view(values.dtype), _thin(self.record, shape)
        if thin is None:
            numbers[: len(values)].copy_(values)
            values.zero_()
            return
        rows, columns, rank = thin
        matrix = values.view(rows, columns)
        before = self._factors.get(key)
        if before is None or before.shape != (columns, rank):
            before = self._first(key, columns, rank, values)
        spoilt = bool(values[0].isnan())
        left = matrix[:, :rank] if spoilt else orthogonal(matrix @ before)
        right = matrix.T @ left
        self._new_factors[key] = torch.where(right.any(0), right, before)
        numbers[: rows * rank].view(rows, rank).copy_(left)
        numbers[rows * rank : (rows + columns) * rank].view(columns, rank).copy_(right)
        matrix.addmm_(left, right.T, alpha=-1.0)

    def _first(self, key: tuple[int, int], columns: int, rank: int, like: Tensor) -> Tensor:
        """Draw the first factor of a piece, seeded by name and place: the same on every worker."""
        dice = torch.Generator().manual_seed(zlib.crc32(f"{self.names[key[0]]} {key[1]}".encode()))
        return torch.randn(columns, rank, generator=dice, dtype=torch.float64).to(like)

    def dense_piece(self, variable: int, start: int, end: int) -> Tensor:
        """Return all numbers of a piece, which leaves no residual."""
        values = self._memory(self._draft, "residual", variable)[start:end]
        sent = values.clone()
        values.zero_()
        return sent

    def encode_rows(self, variable: int, start: int, rows: Tensor, values: Tensor) -> Tensor:
        """Encode rows of a sparse gradient, in the piece that begins with row `start`, with their
        residual."""
        assert isinstance(self.record, Int8)
        kept = self._memory(self._kept, "residual", variable).view(self._like[variable].shape)
        draft = (kept[rows.to(kept.device)] + values.to(kept.device)).reshape(-1)
        if not finite(draft):
            self._spoilt = True
            draft.fill_(math.nan)
        wire = torch.zeros(row_bytes(self.record, len(draft), draft.itemsize), dtype=torch.uint8)
        on_device = wire.to(draft.device)
        self.record.take(draft, [len(draft)], on_device)
        self._rows[variable, start] = rows, draft.view(values.shape)
        return wire.copy_(on_device)

    def settle(self, *, counted: bool) -> None:
        """End the push: keep its drafts if it counted, else the old residuals."""
        if counted and not self._spoilt:
            for name, drafts in self._draft.items():
                kept = self._kept[name]
                for i in self._drafted:
                    kept[i], drafts[i] = drafts[i], kept[i]
            self._factors |= self._new_factors
            for (variable, _), (rows, left) in self._rows.items():
                kept_rows = self._memory(self._kept, "residual", variable)
                shape = self._like[variable].shape
                kept_rows.view(shape)[rows.to(left.device)] = left
        self.pushes += counted
        self._drafted.clear()
        self._rows.clear()
        self._new_factors.clear()
        self._spoilt = False

    # --- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Copy what this worker carries from push to push, by parameter."""
        kept: Kept = {}
        for name, tensors in self._kept.items():
            both = zip(self.names, tensors, self._like, strict=True)
            kept[name] = {
                n: t.view(like.shape).cpu().clone() for n, t, like in both if t is not None
            }
        kept["factors"] = {
            f"{self.names[i]} {at}": q.cpu().clone() for (i, at), q in self._factors.items()
        }
        return {"wire": repr(self.record), "pushes": self.pushes, "kept": kept}

    def load(self, states: Sequence[Mapping[str, Any]], index: int, count: int, mean: bool) -> None:
        """Resume from the states of all workers, as worker `index` of `count`.

        If the number of workers has changed, each takes an equal part of the residuals' sum; with
        `mean`, where all pushes of a batch make one update, the mean of the residuals.
        """
        self.pushes = int(states[min(index, len(states) - 1)]["pushes"])
        if len(states) == count:
            kept: Kept = states[index]["kept"]
        else:
            kept = shared_out([s["kept"] for s in states], len(states) if mean else count)
        for name in self._kept:
            for i, parameter in enumerate(self.names):
                found = kept.get(name, {}).get(parameter)
                if found is not None and found.shape == self._like[i].shape:
                    self._memory(self._kept, name, i).copy_(found.reshape(-1))
        numbers = {name: i for i, name in enumerate(self.names)}
        for key, factor in kept.get("factors", {}).items():
            name, _, at = key.rpartition(" ")
            if name in numbers:
                like = self._like[numbers[name]]
                self._factors[numbers[name], int(at)] = factor.to(like)


def _masks(record: Compression) -> bool:
    return isinstance(record, TopK) and record.masking


def row_bytes(record: Int8, count: int, itemsize: int) -> int:
    """Return the bytes of `count` encoded numbers in rows of a sparse gradient."""
    return record.room([count], itemsize) if count else 0
