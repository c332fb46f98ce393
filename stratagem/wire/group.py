"""One torch process group, reduced to the four moves that the cross-device algorithms need.

Groups are made directly, never through `init_process_group`: that one is global to the process
(so two strategies could not live side by side), replaces `sys.excepthook`, and makes newer Keras
wrap models in DDP. Sixteen-bit tensors travel as they are and are added up in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Meeting:
    """Where a group comes together: a store, the address to listen on, and a time limit."""

    store: Any
    hostname: str
    limit: timedelta


class Group:
    """Some replicas, by their place in this group: 0 .. size-1."""

    def __init__(self, name: str, rank: int, size: int, backend: str, meeting: Meeting) -> None:
        self.rank, self.size = rank, size
        store = dist.PrefixStore(name, meeting.store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = meeting.limit
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = meeting.limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.hostname)]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def sum(self, flat: Tensor) -> Any | None:
        """Add up over the group, in place; returns torch's work handle if it is still running."""
        if self.size == 1:
            return None
        if flat.dtype in _HALF:
            self._sum_half(flat)
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        return self._group.allreduce([flat], options)

    def _sum_half(self, flat: Tensor) -> None:
        """Scatter the chunks, add each in fp32 on one member, gather the rounded sums."""
        count, size = flat.numel(), self.size
        chunk = -(-count // size)
        sent = flat.new_zeros(size * chunk)
        sent[:count].copy_(flat)
        received = torch.empty_like(sent)
        self._group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()).wait()
        total = received.view(size, chunk).float().sum(0).to(flat.dtype)
        parts = list(sent.view(size, chunk).unbind(0))
        self._group.allgather([parts], [total]).wait()
        flat.copy_(sent[:count])

    def reduce_to(self, flat: Tensor, root: int) -> None:
        """Leave the group's sum in the root's tensor; the others' content is undefined."""
        if self.size == 1:
            return
        if flat.dtype in _HALF:
            gather = dist.GatherOptions()
            gather.rootRank = root
            parts = [torch.empty_like(flat) for _ in range(self.size)] if self.rank == root else []
            self._group.gather([parts] if parts else [], [flat], gather).wait()
            if parts:
                flat.copy_(torch.stack(parts).float().sum(0))
            return
        options = dist.ReduceOptions()
        options.rootRank = root
        options.reduceOp = dist.ReduceOp.SUM
        self._group.reduce([flat], options).wait()

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Overwrite everybody's tensor with the root's."""
        if self.size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([flat], options).wait()

    def gather(self, flat: Tensor) -> list[Tensor]:
        """Everybody's tensor of one common size, in order."""
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        self._group.allgather([parts], [flat]).wait()
        return parts

    def abort(self) -> None:
        """Wake whoever waits in this group, with an error."""
        self._group.abort()
