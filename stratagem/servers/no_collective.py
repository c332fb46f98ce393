"""Workers of parameter servers have no collective."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.training.replica import Replica
from stratagem.wire.collective import Collective, Pending


class NoCollective(Collective):
    """Stands where mirrored replicas have a collective; every use of it is refused."""

    overlaps = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        _refuse()

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        _refuse()

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        _refuse()

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        _refuse()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        _refuse()

    def barrier(self) -> None:
        _refuse()


def in_group(replica: Replica) -> bool:
    """Whether the replica is one of several devices of one worker."""
    return replica.count > 1 and not isinstance(replica.collective, NoCollective)


def _refuse() -> NoReturn:
    raise NotDistributable(
        "workers of a strategy with parameter servers do not wait for each other, so they cannot "
        "add up or gather values together; return them from strategy.run and combine them there, "
        "or use MirroredStrategy."
    )
