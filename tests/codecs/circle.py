"""Replicas as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from stratagem.wire.collective import Collective, Pending, apply_weight

T = TypeVar("T")


class Circle(Collective):
    """The collective of one such replica; messages are in a list that all threads share."""

    def __init__(self, rank: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, len(board), board, barrier

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        apply_weight(flat, weight)
        total = sum(self._told(flat.clone()), torch.zeros_like(flat))
        flat.copy_(total)
        return Pending()

    def _told(self, mine: Tensor) -> list[Tensor]:
        self._board[self.rank] = mine
        self._barrier.wait(20)
        told = list(self._board)
        self._barrier.wait(20)
        return told

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        return self._told(data.clone())

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        return self._told(torch.empty(0) if data is None else data.clone())[source]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._told(tensor.clone())[source])

    def barrier(self) -> None:
        self._barrier.wait(20)


def together(count: int, act: Callable[[Circle], T]) -> list[T]:
    """Run a function on `count` replicas at once; returns their results by rank."""
    board, barrier = [torch.empty(0)] * count, threading.Barrier(count)

    def one(rank: int) -> T:
        try:
            return act(Circle(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
