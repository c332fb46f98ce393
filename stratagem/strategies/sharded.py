"""The sharded strategy: parameters, gradients and optimizer state divided over the replicas."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from stratagem.arguments import by_name
from stratagem.cluster.environment import detect
from stratagem.cluster.spec import Place
from stratagem.errors import UsageError
from stratagem.strategies.mirrored import devices_here, refuse_role
from stratagem.strategies.strategy import Strategy
from stratagem.training import cross_device
from stratagem.training.agreement import Patience
from stratagem.training.cross_device import (
    CrossDeviceOps,
    NcclAllReduce,
    RingAllReduce,
    SharedMemoryAllReduce,
)
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.settings import Settings


class ShardedStrategy(Strategy):
    """Data parallelism with the result of one device, and 1/N of everything on each replica.

    Args:
        devices: as in `MirroredStrategy`.
        cross_device_ops: None takes "shared_memory" on the CPUs of one machine, "ring" (Gloo)
            between machines, "nccl" on GPUs. "ring" divides by fully_shard on one machine, too.
        sync_batchnorm: normalise over the global batch instead of each replica's share.
        cluster: a `Place` to use instead of the one in the environment.
        patience: how long to wait for tasks.
        insecure: train over a network without STRATAGEM_SECRET; see docs/security.md.

    CPU replicas of one machine have one set of parameters, gradients and optimizer state in shared
    memory. Between machines, and on GPUs, torch's fully_shard divides the layers. See
    docs/sharded.md.
    """

    @by_name
    def __init__(
        self,
        devices: Sequence[str | torch.device] | str | None = None,
        cross_device_ops: CrossDeviceOps | str | None = None,
        *,
        sync_batchnorm: bool = False,
        cluster: Place | None = None,
        patience: Patience | None = None,
        insecure: bool = False,
    ) -> None:
        op = cross_device.named(cross_device_ops)
        if op not in (None, RingAllReduce(), NcclAllReduce(), SharedMemoryAllReduce()):
            raise UsageError(
                f"ShardedStrategy has no cross_device_ops={cross_device_ops!r}; choose one of "
                "'shared_memory', 'ring', 'nccl', or leave it out."
            )
        settings = Settings(op, sync_batchnorm=sync_batchnorm, sharded=True)
        place = cluster if cluster is not None else detect(os.environ)
        refuse_role(place, "sharded")
        found, patience = devices_here(devices, place), patience or Patience()
        super().__init__(
            ReplicaGroup(found, settings, place, patience, insecure=insecure), settings
        )
