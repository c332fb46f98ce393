"""Reference formulas of the compressions, as in the papers, for all replicas in one process."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import stratagem as sg

Parts = list[Tensor]  # one replica's numbers, by parameter


def int8(parts: Parts, block: int) -> Parts:
    flat = torch.cat(parts)
    found = torch.zeros_like(flat)
    for start in range(0, len(flat), block):
        piece = flat[start : start + block]
        scale = float(torch.tensor(float(piece.abs().max()) / 127, dtype=torch.float32))
        if scale:
            found[start : start + block] = (piece / scale).round().clamp(-127, 127) * scale
    return list(torch.split(found, [len(p) for p in parts]))


def sign(parts: Parts) -> Parts:
    return [torch.where(p >= 0, 1.0, -1.0).double() * p.abs().mean() for p in parts]


def top(parts: Parts, share: float) -> Parts:
    found = []
    for p in parts:
        count = min(len(p), max(1, round(share * len(p))))
        order = sorted(range(len(p)), key=lambda i: -abs(float(p[i])))
        chosen = torch.zeros_like(p)
        chosen[order[:count]] = p[order[:count]]
        found.append(chosen)
    return found


def compressed(wire: Any) -> Callable[[Parts], Parts]:
    if isinstance(wire, sg.Int8):
        return lambda parts: int8(parts, wire.block)
    if isinstance(wire, sg.TopK):
        return lambda parts: top(parts, wire.share)
    return sign


class Replicas:
    """A compressed all-reduce of N replicas; parameters are in the order of the wire."""

    def __init__(self, wire: Any, named: list[tuple[str, Tensor]], count: int) -> None:
        self.wire, self.count, self.step = wire, count, 0
        self.names = [name for name, _ in named]
        self.shapes = [p.shape for _, p in named]
        self.sizes = [p.numel() for _, p in named]
        total = sum(self.sizes)
        self.e = [torch.zeros(total).double() for _ in range(count)]
        self.u = [torch.zeros(total).double() for _ in range(count)]
        self.f = torch.zeros(total).double()
        self.q: dict[str, Tensor] = {}

    def add_up(self, gradients: list[Tensor]) -> Tensor:
        if self.count == 1:  # alone it sends nothing, and what is kept waits
            self.step += 1
            return gradients[0]
        momentum = getattr(self.wire, "momentum", 0.0)
        for i, g in enumerate(gradients):
            self.u[i] = momentum * self.u[i] + g
            self.e[i] = self.e[i] + self.u[i]
        self.step += 1
        if self.step <= self.wire.dense_steps:
            total = sum(self.e, self.f)
            self.e, self.f = [0 * e for e in self.e], 0 * self.f
            return total
        return self._low_rank() if isinstance(self.wire, sg.PowerSGD) else self._two_sided()

    def _pieces(self, flat: Tensor, start: int, end: int) -> Parts:
        bounds, at = [], 0
        for size in self.sizes:
            low, high = max(start, at), min(end, at + size)
            if low < high:
                bounds.append(flat[low:high])
            at += size
        return bounds

    def _two_sided(self) -> Tensor:
        encode, result = compressed(self.wire), torch.zeros_like(self.f)
        total = len(result)
        for s in range(self.count):
            start, end = total * s // self.count, total * (s + 1) // self.count
            if start == end:
                continue
            gathered = self.f[start:end].clone()
            for i, e in enumerate(self.e):
                sent = torch.cat(encode(self._pieces(e, start, end)))
                e[start:end] -= sent
                gathered += sent
                if isinstance(self.wire, sg.TopK):
                    self.u[i][start:end][sent != 0] = 0
            whole = torch.zeros_like(self.f)
            whole[start:end] = gathered
            result[start:end] = torch.cat(encode(self._pieces(whole, start, end)))
            self.f[start:end] = gathered - result[start:end]
        return result

    def _low_rank(self) -> Tensor:
        result, at = torch.zeros_like(self.f), 0
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            rows, columns = (shape[0], size // shape[0]) if len(shape) > 1 else (0, 0)
            rank = min(self.wire.rank, rows, columns)
            mine = [e[at : at + size] for e in self.e]
            if rank * (rows + columns) < size and rank:
                result[at : at + size] = self._matrix(name, mine, rows, columns, rank)
            else:
                result[at : at + size] = sum(mine, torch.zeros(size).double())
                for e in mine:
                    e.zero_()
            at += size
        return result

    def _matrix(self, name: str, mine: Parts, rows: int, columns: int, rank: int) -> Tensor:
        if name not in self.q:
            dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(columns, rank, generator=dice, dtype=torch.float64)
            self.q[name] = drawn
        matrices = [e.view(rows, columns) for e in mine]
        p = torch.linalg.qr(sum(m @ self.q[name] for m in matrices)).Q
        own = [m.T @ p for m in matrices]
        self.q[name] = torch.stack(own).sum(0)
        for m, q in zip(matrices, own, strict=True):
            m -= p @ q.T
        return (p @ self.q[name].T).reshape(-1)


class Pushes:
    """A worker's compressed pushes to servers that hold whole parameters, and its residuals."""

    def __init__(self, wire: Any, named: dict[str, Tensor]) -> None:
        self.wire, self.step = wire, 0
        self.e = {name: torch.zeros_like(p).detach() for name, p in named.items()}
        self.u = {name: torch.zeros_like(p).detach() for name, p in named.items()}
        self.q: dict[str, Tensor] = {}

    def sent(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found, momentum = {}, getattr(self.wire, "momentum", 0.0)
        for name, g in gradients.items():
            self.u[name] = momentum * self.u[name] + g
            v = self.e[name] + self.u[name]
            dense = self.step < self.wire.dense_steps
            c = v.clone() if dense else self._compressed(name, v)
            self.e[name] = v - c
            if momentum and not dense:
                self.u[name] = torch.where(c != 0, 0.0, self.u[name])
            found[name] = c
        self.step += 1
        return found

    def _compressed(self, name: str, v: Tensor) -> Tensor:
        if not isinstance(self.wire, sg.PowerSGD):
            return compressed(self.wire)([v.reshape(-1)])[0].view(v.shape)
        rank = self.wire.rank
        if v.dim() < 2 or rank * sum(v.shape) >= v.numel():
            return v.clone()
        if name not in self.q:
            dice = torch.Generator().manual_seed(zlib.crc32(f"{name} 0".encode()))
            self.q[name] = torch.randn(v.shape[1], rank, generator=dice, dtype=torch.float64)
        p = torch.linalg.qr(v @ self.q[name]).Q
        self.q[name] = v.T @ p
        return p @ self.q[name].T
