"""Collectives over torch's process groups: Gloo between CPUs and hosts, NCCL between GPUs.

ring              every member sends and adds chunks in a circle (what Gloo and NCCL do)
one device        all send to one member, which adds and sends the sum back
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
from typing import TypeVar

import torch
from torch import Tensor

from stratagem.cluster.membership import Membership
from stratagem.errors import ReplicaError
from stratagem.wire.byte_messages import ByteMessages
from stratagem.wire.collective import Collective, Pending, apply_weight
from stratagem.wire.process_group import HALF, Meeting, ProcessGroup

T = TypeVar("T")


class TorchCollective(Collective):
    """Every replica in one ring; the other algorithms override `_sum`."""

    def __init__(
        self, rank: int, size: int, backend: str, meeting: Meeting, membership: Membership
    ) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        self.meeting = meeting
        self.membership = membership
        self.messages = ProcessGroup("messages", rank, size, "gloo", meeting)
        self.flat = ProcessGroup("flat", rank, size, backend, meeting)
        self._bytes = ByteMessages(self.messages)  # flushed before others are waited for
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="stratagem-reduce")
        self._last: Future[None] | None = None
        #: the thread of what is done aside, while something is
        self._beside: int | None = None
        self.runs_beside = backend == "gloo"
        #: collectives of some of its members, by their ranks
        self.parts: dict[tuple[int, ...], TorchCollective] = {}
        membership.on_trouble(lambda _: self._abort())

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        apply_weight(flat, weight)
        self.named(self._bytes.flush)
        if self._beside == threading.get_ident():
            self._sum(flat)
            return Pending()
        if flat.device.type != "cpu" and self.backend == "gloo":
            return self._staged(flat)
        alone = flat.dtype not in HALF or self.backend == "gloo"
        idle = self._last is None or self._last.done()  # a group's operations keep their order
        if type(self) is TorchCollective and alone and idle:
            pending = self.flat.sum(flat)  # runs beside the computation by itself
            return Pending(lambda: self.named(pending.wait))
        if self.backend != "gloo":
            self.named(lambda: self._sum(flat))  # queued on the GPU; nothing blocks here
            return Pending()
        future = self._last = self._aside.submit(self._sum, flat)
        return Pending(lambda: self.named(future.result))

    def beside(self, work: Callable[[], None]) -> Pending:
        def do() -> None:
            self._beside = threading.get_ident()
            try:
                work()
            finally:
                self._beside = None

        self.named(self._bytes.flush)
        if not self.runs_beside:
            return super().beside(work)
        future = self._last = self._aside.submit(do)
        return Pending(lambda: self.named(future.result))

    def _sum(self, flat: Tensor) -> None:
        self.flat.sum(flat).wait()

    def _staged(self, flat: Tensor) -> Pending:
        """Gloo adds on the CPU: replicas that share one GPU meet in host memory."""
        host = flat.cpu()
        future = self._last = self._aside.submit(self._sum, host)

        def finish() -> None:
            self.named(future.result)
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
        """Where this group's backend can send it from, once what is queued aside is done: a group's
        operations must keep their order."""
        self.named(self._bytes.flush)
        if self._last is not None and self._beside != threading.get_ident():
            self.named(self._last.result)
        return data.cpu() if self.backend == "gloo" else data

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        trouble = self.membership.trouble
        if self.rank == source and trouble is not None and trouble.kind != "joined":
            raise trouble.error()  # a message to one that is dead need not fail by itself
        return self.named(lambda: self._bytes.broadcast(data, source))

    def hold(self) -> None:
        self._bytes.hold()

    def tell(self) -> None:
        self.named(self._bytes.tell)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
        received = self.broadcast_bytes(raw if self.rank == source else None, source)
        if self.rank != source and flat.numel():
            with torch.no_grad():
                tensor.copy_(received.view(tensor.dtype).view(tensor.shape))

    def barrier(self) -> None:
        self.named(self._bytes.barrier)

    def named(self, action: Callable[[], T]) -> T:
        """Run; an error of the wire becomes one that names the member behind it."""
        try:
            return action()
        except ReplicaError:
            self._abort()  # what is under way will never end
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
        self._aside.shutdown(wait=False, cancel_futures=True)
        for part in self.parts.values():
            part.close()


class OneDeviceCollective(TorchCollective):
    """All send to one member, which adds up and sends back."""

    root = 0

    def _sum(self, flat: Tensor) -> None:
        self.flat.reduce_to(flat, self.root)
        self.flat.broadcast(flat, self.root)


class HierarchicalCollective(TorchCollective):
    """Packs with a leader each; `packs` lists the ranks of every pack."""

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
