"""The central storage strategy: parameters on one device of a machine, computation on others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stratagem.arguments import by_name
from stratagem.rules.updates import Synchronous, Updates
from stratagem.servers.local_cluster import LocalCluster
from stratagem.servers.worker_group import WorkerGroup
from stratagem.strategies.pipeline import refuse_cluster
from stratagem.strategies.server_strategy import ServerStrategy, check_spares
from stratagem.strategies.strategy import TaskGroup
from stratagem.training import devices
from stratagem.training.agreement import Patience
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.settings import Served, Settings


class CentralStorageStrategy(ServerStrategy):
    """One set of parameters on one machine.

    Args:
        compute_devices: the devices that compute gradients; by default every GPU, else the CPU.
        parameter_device: the device that keeps and updates the parameters; by default the CPU, or
            the GPU if there is just one.
        updates: `Synchronous(spares=)`, or `Asynchronous(...)`; by default synchronous.
        patience: how long to wait for a replica.

    Synchronous CPU replicas share the parameters' memory, and each updates its own slice. In any
    other case a server on this machine keeps the parameters, in memory that it shares with workers.
    """

    @by_name
    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | str | None = None,
        parameter_device: str | torch.device | None = None,
        *,
        updates: Updates | None = None,
        patience: Patience | None = None,
    ) -> None:
        refuse_cluster("parameters are on one device of one machine")
        compute = devices.resolve(compute_devices)
        (home,) = devices.resolve([_home() if parameter_device is None else parameter_device])
        updates = Synchronous() if updates is None else updates
        check_spares(updates, len(compute))
        patience = patience or Patience()
        in_step = updates == Synchronous()
        on_cpu = all(name.startswith("cpu") for name in (*compute, home))
        replica_group: TaskGroup
        if in_step and (on_cpu or compute == (home,)):
            settings = Settings()
            replica_group = ReplicaGroup(compute, settings, None, patience)
        else:
            settings = Settings(served=Served(updates, None, len(compute), 1))
            cluster = LocalCluster(workers=len(compute), ps=1)
            replica_group = WorkerGroup(compute, None, cluster, patience, parameter_device=home)
        super().__init__(replica_group, settings)
        self.parameter_device = home


def _home() -> str:
    found = [name for name in devices.present() if not name.startswith("cpu")]
    return found[0] if len(found) == 1 else "cpu:0"
