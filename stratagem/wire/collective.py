"""The collective interface: what a group of replicas can do together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: the types whose sums are made in fp32
HALF = (torch.float16, torch.bfloat16)


class Pending:
    """An operation under way; `wait` returns when its tensor may be read."""

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
    #: whether it takes part in operations; a standby's does not
    live: bool = True

    @abstractmethod
    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeroed flat storage that `all_reduce` handles best. Collective."""

    def release(self, flat: Tensor) -> None:  # noqa: B027
        """Give a `buffer` back."""

    @abstractmethod
    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        """Replace `flat` by the sum over replicas of `weight * flat`.

        With a weight of zero the content is ignored, NaN included.
        """

    #: whether `beside` runs work on another thread, beside the computation
    runs_beside: bool = False

    def beside(self, work: Callable[[], None]) -> Pending:
        """Run work that uses this collective, in order with its other operations and, where
        possible, beside the computation. Replicas call it in the same order."""
        work()
        return Pending()

    @abstractmethod
    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Gather every replica's flat uint8 CPU tensor, in rank order; sizes may differ.

        Read or copy the results before the next message, which may reuse their memory.
        """

    def swap(self, rows: Tensor) -> Tensor:
        """Send row r of a table of bytes to replica r (all-to-all); returns the received rows.

        Rows have the same number of bytes on every replica.
        """
        found = self.gather_bytes(rows.detach().cpu().reshape(-1))
        received = [each.view(rows.shape)[self.rank] for each in found]
        return torch.stack(received).to(rows.device)

    def collect(self, row: Tensor) -> Tensor:
        """Gather every replica's row of bytes, all of one length, in rank order."""
        return torch.stack(self.gather_bytes(row.detach().cpu())).to(row.device)

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        """Send `flat` to the receivers; returns what the senders sent, in their order.

        Every replica calls it, with the same number of elements and matching ranks.
        """
        raw = flat.detach().cpu().contiguous().view(torch.uint8)
        found = self.gather_bytes(raw)
        return [found[rank].clone().view(flat.dtype).to(flat.device) for rank in senders]

    @abstractmethod
    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        """Return the source's flat uint8 CPU tensor on every replica; read or copy it before the
        next message."""

    def hold(self) -> None:  # noqa: B027
        """Until `tell`, the first replica may delay its broadcasts and send them as one message."""

    def tell(self) -> None:  # noqa: B027
        """Send the delayed broadcasts, and delay no more."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` with the source's tensor."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
        received = self.broadcast_bytes(raw if self.rank == source else None, source)
        if self.rank != source and flat.numel():
            with torch.no_grad():  # only a clone is sure to be aligned for any dtype
                tensor.copy_(received.clone().view(tensor.dtype).view(tensor.shape))

    @abstractmethod
    def barrier(self) -> None:
        """Return when every replica has called it."""

    def step(self, work: Callable[[], None]) -> bool:
        """Run a step of a loop, which may contain collectives; False if a standby skipped it."""
        work()
        return True

    def offer(  # noqa: B027
        self, state: Callable[[], Any] | None, adopt: Callable[[Any], None]
    ) -> None:
        """Let standbys take over in the steps to come, or with None in none of them.

        The first replica's `state`, in the middle of a step, goes to a standby's `adopt`.
        """

    def close(self) -> None:  # noqa: B027
        """Free connections and memory."""


def add_up(rows: Tensor) -> Tensor:
    """Sum the rows of a table; 16-bit numbers in fp32, rounded once."""
    return rows.sum(0, dtype=torch.float32 if rows.dtype in HALF else rows.dtype).to(rows.dtype)


def apply_weight(flat: Tensor, weight: float) -> None:
    """Scale in place; a weight of zero erases, so that 0 * NaN is 0."""
    if weight == 0.0:
        flat.zero_()
    elif weight != 1.0:
        flat.mul_(weight)


class Alone(Collective):
    """The group of one replica: nothing travels."""

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
