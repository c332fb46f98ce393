"""Eight workers as threads of one process: the real committers and codecs, and bytes counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.cluster.membership import Membership
from stratagem.codecs.reducer import Plain
from stratagem.codecs.wire_choice import reducer
from stratagem.training.exchange import GradientExchange
from stratagem.training.local_steps import LocalUpdates
from stratagem.training.replica import Replica
from stratagem.wire.collective import Collective, Pending, apply_weight

BANDWIDTH, LATENCY = 1e9 / 8, 50e-6  # of the simulated link: 1 Gbit/s, seconds a message


class ThreadCollective(Collective):
    """One of the threads; counts what a ring over sockets would send, and the time that takes."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, len(board) - 1, board, barrier
        self.bytes, self.seconds = 0.0, 0.0

    def _count(self, size: float, messages: int) -> None:
        self.bytes += size
        self.seconds += size / BANDWIDTH + messages * LATENCY

    def _told(self, mine: Any) -> list[Any]:
        self._board[self.rank] = mine
        self._barrier.wait(300)
        told = self._board[:-1]
        self._barrier.wait(300)
        return told

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        apply_weight(flat, weight)
        others = self.size - 1
        self._count(2 * others / self.size * flat.nbytes, 2 * others)
        self._board[self.rank] = flat
        if self._barrier.wait(300) == 0:  # one adds up for all: eight sums would be the same
            total = self._board[-1] = flat.clone()
            for other in self._board[:-1]:
                if other is not flat:
                    total.add_(other)
        self._barrier.wait(300)
        flat.copy_(self._board[-1])
        self._barrier.wait(300)
        return Pending()

    def swap(self, rows: Tensor) -> Tensor:
        self._count(rows.nbytes * (self.size - 1) / self.size, 1)
        return torch.stack([each[self.rank] for each in self._told(rows.clone())])

    def collect(self, row: Tensor) -> Tensor:
        self._count(row.nbytes * (self.size - 1), 1)
        return torch.stack(self._told(row.clone()))

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        self._count(flat.nbytes * len(receivers), 1)
        told = self._told(flat.clone())
        return [told[rank] for rank in senders]

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        return self._told(data.clone())

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        found: Tensor = self._told(data)[source]
        return found

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._told(tensor.clone())[source])

    def barrier(self) -> None:
        self._told(None)


def all_at_once(count: int, act: Callable[[ThreadCollective], Any]) -> list[Any]:
    board: list[Any] = [None] * (count + 1)  # of each, and of all
    barrier = threading.Barrier(count)

    def one(rank: int) -> Any:
        try:
            return act(ThreadCollective(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class Worker:
    """One thread's model, and where its gradients go."""

    def __init__(
        self, collective: ThreadCollective, module: nn.Module, optimizer: Any, wire: Any, sync: Any
    ) -> None:
        self.collective, self.module, self.optimizer = collective, module, optimizer
        rank, size = collective.rank, collective.size
        cpu = torch.device("cpu")
        self.replica = Replica(rank, size, cpu, "worker", collective, Membership.alone())
        named = list(module.named_parameters())
        if sync is None:
            self.committer = GradientExchange(
                named, self.replica, reducer(collective, wire), notes=2
            )
        else:
            self.committer = LocalUpdates(
                named, self.replica, Plain(collective), every=sync, notes=2
            )

    def step(self, loss: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        """One update from this worker's part of the rows of a batch."""
        mine = rows.chunk(self.collective.size)[self.collective.rank]
        self.replica.share.set(len(mine), len(rows), 1.0)
        (loss(mine) * (len(mine) / len(rows))).backward()
        self.committer.commit([0.0, 0.0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.committer.sync()
