"""The collective interface: what a group of replicas can do together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: the types of 16 bits, which are added up in fp32
HALF = (torch.float16, torch.bfloat16)


class Pending:
    """Work under way; `wait` returns when its tensor may be read."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait

    def wait(self) -> None:
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()


class Collective(ABC):
    """A fixed group of replicas that call the same operations in the same order."""

    rank: int
    size: int
    #: whether a reduction runs beside the computation, so that several buckets pay off
    overlaps: bool = True
    #: whether replicas map each other's memory (`wire.shared_memory.sharing`)
    shares_memory: bool = False
    #: whether it takes part: not so a standby's
    live: bool = True

    @abstractmethod
    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeroed flat storage that `all_reduce` handles best. Collective."""

    def release(self, flat: Tensor) -> None:  # noqa: B027
        """Give a `buffer` back."""

    @abstractmethod
    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        """Replace `flat` by the sum over replicas of `weight * flat`.

        A weight of zero means that the content is ignored, NaN included.
        """

    #: whether `beside` runs beside the computation, on a thread of its own
    runs_beside: bool = False

    def beside(self, work: Callable[[], None]) -> Pending:
        """Do what uses this collective, in turn with all else that does; beside the computation
        where that is possible. Replicas call it in the same order."""
        work()
        return Pending()

    @abstractmethod
    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Every replica's one-dimensional uint8 CPU tensor, in rank order; sizes may differ.

        Read or copy them before the next message: their memory may be used again.
        """

    def swap(self, rows: Tensor) -> Tensor:
        """Send row r of a table of bytes to replica r; returns what came from each, in rank order.

        On every replica the same number of bytes a row.
        """
        found = self.gather_bytes(rows.detach().cpu().reshape(-1))
        mine = [each.view(rows.shape)[self.rank] for each in found]
        return torch.stack(mine).to(rows.device)

    def collect(self, row: Tensor) -> Tensor:
        """Every replica's row of bytes, all of one length, in rank order."""
        return torch.stack(self.gather_bytes(row.detach().cpu())).to(row.device)

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        """Send `flat` to some replicas; returns what came from the senders, in their order.

        Every replica calls it, with as many numbers, and `receivers` and `senders` of all fit.
        """
        raw = flat.detach().cpu().contiguous().view(torch.uint8)
        found = self.gather_bytes(raw)
        return [found[rank].clone().view(flat.dtype).to(flat.device) for rank in senders]

    @abstractmethod
    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        """The source's one-dimensional uint8 CPU tensor, on every replica; read or copy it before
        the next message."""

    def hold(self) -> None:  # noqa: B027
        """From here to `tell`, what the first replica tells all may come later, in one message."""

    def tell(self) -> None:  # noqa: B027
        """The others have everything from here on, or it is on its way."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` with the source's."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
        received = self.broadcast_bytes(raw if self.rank == source else None, source)
        if self.rank != source and flat.numel():
            with torch.no_grad():  # the clone begins where numbers of any type may begin
                tensor.copy_(received.clone().view(tensor.dtype).view(tensor.shape))

    @abstractmethod
    def barrier(self) -> None:
        """Return when every replica has called it."""

    def step(self, work: Callable[[], None]) -> bool:
        """Do a step of a loop, in which replicas may meet; returns whether it was done here, and
        not left out by a standby."""
        work()
        return True

    def offer(  # noqa: B027
        self, state: Callable[[], Any] | None, adopt: Callable[[Any], None]
    ) -> None:
        """Standbys may take part in the steps to come: `state` of the first replica in the midst of
        one is what `adopt` is given in a standby. None: they cannot."""

    def close(self) -> None:  # noqa: B027
        """Let go of connections and memory, where there are any."""


def add_up(rows: Tensor) -> Tensor:
    """Add up the rows of a table; numbers of 16 bits in fp32, rounded once."""
    return rows.sum(0, dtype=torch.float32 if rows.dtype in HALF else rows.dtype).to(rows.dtype)


def apply_weight(flat: Tensor, weight: float) -> None:
    """Scale in place; a weight of zero erases, so that 0 * NaN is 0."""
    if weight == 0.0:
        flat.zero_()
    elif weight != 1.0:
        flat.mul_(weight)


class Alone(Collective):
    """The group of one: nothing travels."""

    rank = 0
    size = 1

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        apply_weight(flat, weight)
        return Pending()

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        return [data]

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        assert data is not None
        return data

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return None

    def barrier(self) -> None:
        return None
