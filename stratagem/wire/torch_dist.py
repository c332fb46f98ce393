"""Collectives over torch's process groups: Gloo between CPUs and hosts, NCCL between GPUs.

ring              every member sends and sums chunks in a ring (what Gloo and NCCL do)
one device        all send to one member, which sums and sends the sum back
hierarchical      members -> leader of their pack; leaders among themselves; back again

        pack 0          pack 1
    0 <- 1, 2, 3    4 <- 5, 6        1. reduce inside each pack
    0 <-----------> 4                2. all-reduce between the leaders
    0 -> 1, 2, 3    4 -> 5, 6        3. broadcast inside each pack
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from stratagem.cluster.membership import Membership
from stratagem.errors import ReplicaError
from stratagem.wire.byte_messages import ByteMessages
from stratagem.wire.collective import HALF, Collective, Pending, apply_weight
from stratagem.wire.process_group import Meeting, ProcessGroup

T = TypeVar("T")


class OperationQueue:
    """One thread that runs a group's operations, one after another.

    All ranks must begin a group's operations in the same order, so another thread may begin one
    only while the queue is idle.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stratagem-reduce")
        self._last: Future[None] | None = None
        self._thread: int | None = None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` after all that was submitted before."""

        def run() -> None:
            self._thread = threading.get_ident()
            work()

        self._last = self._pool.submit(run)
        return self._last

    @property
    def idle(self) -> bool:
        """Whether all work is done."""
        return self._last is None or self._last.done()

    @property
    def is_current(self) -> bool:
        """Whether the caller is work in the queue."""
        return self._thread == threading.get_ident()

    def drain(self) -> None:
        """Wait until the queue is idle; no-op in the queue itself."""
        if self._last is not None and not self.is_current:
            self._last.result()

    def close(self) -> None:
        """Cancel work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class TorchCollective(Collective):
    """All replicas in one ring; the other algorithms override `_sum`."""

    def __init__(
        self, rank: int, size: int, backend: str, meeting: Meeting, membership: Membership
    ) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        self.meeting = meeting
        self.membership = membership
        self.messages = ProcessGroup("messages", rank, size, "gloo", meeting)
        self.flat = ProcessGroup("flat", rank, size, backend, meeting)
        self._bytes = ByteMessages(self.messages)  # flushed before this replica waits for others
        self._queue = OperationQueue()
        self.runs_beside = backend == "gloo"
        #: subgroups, by their members' ranks
        self.parts: dict[tuple[int, ...], TorchCollective] = {}
        membership.on_trouble(lambda _: self._abort())

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        """Sum beside the computation; the first line that fits says how.

        called from work in the queue   on this thread, which is the queue's
        GPU tensor over Gloo            a copy in host memory, enqueued
        one operation, queue empty      at once; the backend itself runs it beside
        several operations over Gloo    enqueued, as each blocks its thread
        several operations over NCCL    at once, as they block the GPU's stream only
        """
        apply_weight(flat, weight)
        self.named(self._bytes.flush)
        gloo = self.backend == "gloo"
        if self._queue.is_current:
            self._sum(flat)
            return Pending()
        if gloo and flat.device.type != "cpu":
            return self._sum_on_host(flat)
        is_one = type(self) is TorchCollective and (gloo or flat.dtype not in HALF)
        if is_one and self._queue.idle:
            pending = self.flat.sum(flat)
            return Pending(lambda: self.named(pending.wait))
        if gloo:
            return self._enqueue(partial(self._sum, flat))
        self.named(lambda: self._sum(flat))
        return Pending()

    def beside(self, work: Callable[[], None]) -> Pending:
        self.named(self._bytes.flush)
        return self._enqueue(work) if self.runs_beside else super().beside(work)

    def _enqueue(self, work: Callable[[], None]) -> Pending:
        future = self._queue.submit(work)
        return Pending(lambda: self.named(future.result))

    def _sum(self, flat: Tensor) -> None:
        self.flat.sum(flat).wait()

    def _sum_on_host(self, flat: Tensor) -> Pending:
        host = flat.cpu()
        pending = self._enqueue(partial(self._sum, host))

        def finish() -> None:
            pending.wait()
            flat.copy_(host)

        return Pending(finish)

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        return self.named(lambda: self._bytes.gather(data))

    def swap(self, rows: Tensor) -> Tensor:
        given = self._staged_bytes(rows)
        found = torch.empty_like(given)
        self.named(lambda: self.flat.swap_into(found, given).wait())
        return found.to(rows.device)

    def collect(self, row: Tensor) -> Tensor:
        given = self._staged_bytes(row)
        found = given.new_empty(self.size, len(given))
        self.named(lambda: self.flat.gather_into(found, given).wait())
        return found.to(row.device)

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        if self.backend != "gloo":
            return super().trade(flat, receivers, senders)
        mine = self._staged_bytes(flat)
        found = self.named(lambda: self.flat.trade(mine, receivers, senders))
        return [each.to(flat.device) for each in found]

    def _staged_bytes(self, data: Tensor) -> Tensor:
        """Wait for the queue, and return the bytes where the backend can send them from."""
        self.named(self._bytes.flush)
        self.named(self._queue.drain)
        return data.cpu() if self.backend == "gloo" else data

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        trouble = self.membership.trouble
        if self.rank == source and trouble is not None and trouble.kind != "joined":
            raise trouble.error()  # sending to a dead peer need not fail by itself
        return self.named(lambda: self._bytes.broadcast(data, source))

    def hold(self) -> None:
        self._bytes.hold()

    def tell(self) -> None:
        self.named(self._bytes.tell)

    def barrier(self) -> None:
        self.named(self._bytes.barrier)

    def named(self, action: Callable[[], T]) -> T:
        """Run an action; an error of the wire becomes one that names the member behind it."""
        try:
            return action()
        except ReplicaError:
            self._abort()  # operations under way would never end
            raise
        except RuntimeError as error:
            self._abort()
            trouble = self.membership.await_trouble(2.0)
            if trouble is not None:
                raise trouble.error() from error
            self.membership.raise_if_gone()
            raise

    def _groups(self) -> list[ProcessGroup]:
        return [self.messages, self.flat]

    def _abort(self) -> None:
        for group in self._groups():
            group.abort()

    def close(self) -> None:
        if self.backend == "nccl":
            self._abort()
        self._queue.close()
        for part in self.parts.values():
            part.close()


class OneDeviceCollective(TorchCollective):
    """All send to one member, which sums and sends back."""

    root = 0

    def _sum(self, flat: Tensor) -> None:
        self.flat.reduce_to(flat, self.root)
        self.flat.broadcast(flat, self.root)


class HierarchicalCollective(TorchCollective):
    """Sums inside packs, then between their leaders; `packs` lists the ranks of every pack."""

    packs: list[list[int]]

    def join_packs(self, packs: list[list[int]]) -> None:
        self.packs = packs
        index = next(i for i, pack in enumerate(packs) if self.rank in pack)
        pack = packs[index]
        self.pack = ProcessGroup(
            f"pack{index}", pack.index(self.rank), len(pack), self.backend, self.meeting, pack
        )
        leaders = [pack[0] for pack in packs]
        self.leaders = (
            ProcessGroup("leaders", index, len(leaders), self.backend, self.meeting, leaders)
            if self.rank in leaders
            else None
        )

    def _sum(self, flat: Tensor) -> None:
        self.pack.reduce_to(flat, 0)
        if self.leaders is not None:
            self.leaders.sum(flat).wait()
        self.pack.broadcast(flat, 0)

    def _groups(self) -> list[ProcessGroup]:
        return [*super()._groups(), self.pack, *([self.leaders] if self.leaders else [])]
