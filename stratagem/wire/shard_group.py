"""A collective as a torch process group, for torch's fully_shard.

fully_shard needs two operations: an all-gather of parameters and a reduce-scatter of gradients.
Both use the replicas' own connections, so a wait names the replica behind it, as everywhere. Gloo's
own reduce-scatter is an all-reduce for each member; here every member sends each part to its owner,
which sums.

While a model is divided, torch's global process group is this one; at other times there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stratagem.errors import NotDistributable, UsageError
from stratagem.wire.collective import Pending
from stratagem.wire.torch_dist import TorchCollective

_NAME = "stratagem"
_FIRST = 64
_Base: Any = dist.ProcessGroup
_Work: Any = dist.Work
_Store: Any = dist.HashStore  # type: ignore[attr-defined]


class ShardWork(_Work):  # type: ignore[misc]
    """A handle for torch to wait on."""

    def __init__(self, collective: TorchCollective, pending: Pending) -> None:
        super().__init__()
        self._collective, self._pending = collective, pending

    def wait(self, timeout: Any = None) -> bool:
        self._collective.named(self._pending.wait)
        return True


class ShardGroup(_Base):  # type: ignore[misc]
    """The process group operations that fully_shard uses."""

    def __init__(self, collective: TorchCollective) -> None:
        super().__init__(collective.rank, collective.size)
        self._collective = collective
        self._group_name = ""
        #: number of reduce-scatters so far
        self._asked = 0

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def getBackendName(self) -> str:
        return _NAME

    def size(self) -> int:
        return self._collective.size

    def _allgather_base(self, whole: Tensor, part: Tensor, options: Any = None) -> ShardWork:
        return ShardWork(self._collective, self._collective.flat.gather_into(whole, part))

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, options: Any = None) -> ShardWork:
        self._compare(whole.numel())
        operation = getattr(options, "reduceOp", dist.ReduceOp.SUM)
        pending = self._collective.flat.sum_into(part, whole)
        if operation == dist.ReduceOp.SUM:
            return ShardWork(self._collective, pending)
        if operation != dist.ReduceOp.AVG:
            raise UsageError(
                f"fully_shard asks for {operation}, which is neither a sum nor a mean."
            )

        def finish() -> None:
            pending.wait()
            part.div_(self._collective.size)

        return ShardWork(self._collective, Pending(finish))

    def _compare(self, size: int) -> None:
        """Raise if replicas have gradients of different parameters, with which Gloo would end the
        process. On GPUs, where comparing blocks, only in the first steps."""
        self._asked += 1
        if self._collective.backend == "nccl" and self._asked > _FIRST:
            return
        sizes = self._collective.named(partial(self._collective.messages.gather, _number(size)))
        if len({int(each) for each in sizes}) > 1:
            raise NotDistributable(
                "some replicas have gradients of parameters that others did not use in this step, "
                "which torch's fully_shard cannot add up; use every parameter for every batch, or "
                "MirroredStrategy."
            )

    # their names since torch 2.13
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


def _number(value: int) -> Tensor:
    return torch.tensor([value])


#: the group that torch's init_process_group takes
_making: list[ShardGroup] = []


def _make(*_: Any) -> ShardGroup:
    return _making.pop()


@contextmanager
def shard_mesh(collective: TorchCollective, device_type: str) -> Iterator[DeviceMesh]:
    """A device mesh of the replicas, of one axis, over which modules can be divided."""
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed has been initialised in this process, and ShardedStrategy needs its "
            "global process group while it trains; call dist.destroy_process_group() before."
        )
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _make, devices=["cpu", "cuda"])
    _making.append(ShardGroup(collective))
    hook = sys.excepthook  # torch replaces it
    size, rank = collective.size, collective.rank
    dist.init_process_group(_NAME, store=_Store(), rank=rank, world_size=size)
    sys.excepthook = hook
    try:
        yield init_device_mesh(device_type, (size,))
    finally:
        dist.destroy_process_group()
