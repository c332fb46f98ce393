"""stratagem: every way to spread neural-network training over devices and machines, one line apart.

Names are loaded when first used, so that `stratagem --help` need not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "stratagem.cluster.spec": ["ClusterSpec", "Place", "Task"],
    "stratagem.errors": [
        "ClusterError", "DeviceError", "HandshakeError", "NotDistributable", "ReplicaError",
        "ReplicaFailed", "ReplicaLost", "ReplicaMissing", "ReplicaStalled", "StratagemError",
        "UsageError",
    ],
    "stratagem.frontends.model": ["Model"],
    "stratagem.rules.ramp": ["Ramp"],
    "stratagem.rules.staleness": [
        "DelayCompensated", "Drop", "GapAware", "LowerRate", "Policy", "ScaleDown",
    ],
    "stratagem.rules.stats": ["Stats"],
    "stratagem.rules.updates": ["Asynchronous", "Synchronous"],
    "stratagem.state.partition": ["FixedShards", "MaxSize", "MinSize"],
    "stratagem.strategies.central_storage": ["CentralStorageStrategy"],
    "stratagem.strategies.cross_device": [
        "CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice",
        "RingAllReduce", "SharedMemoryAllReduce",
    ],
    "stratagem.strategies.mirrored": ["MirroredStrategy", "MultiWorkerMirroredStrategy"],
    "stratagem.strategies.parameter_server": ["ParameterServerStrategy"],
    "stratagem.strategies.parameters.local_cluster": ["LocalCluster"],
    "stratagem.strategies.replica": ["Replica", "current_replica"],
    "stratagem.strategies.strategy": ["Strategy", "get_strategy"],
    "stratagem.strategies.agreement": ["Patience"],
}  # fmt: skip
_WHERE = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {"callbacks": "stratagem.frontends.callbacks", "plan": "stratagem.plan"}

if TYPE_CHECKING:
    from stratagem.cluster.spec import ClusterSpec as ClusterSpec
    from stratagem.cluster.spec import Place as Place
    from stratagem.cluster.spec import Task as Task
    from stratagem.errors import (
        ClusterError as ClusterError,
    )
    from stratagem.errors import (
        DeviceError as DeviceError,
    )
    from stratagem.errors import (
        HandshakeError as HandshakeError,
    )
    from stratagem.errors import (
        NotDistributable as NotDistributable,
    )
    from stratagem.errors import (
        ReplicaError as ReplicaError,
    )
    from stratagem.errors import (
        ReplicaFailed as ReplicaFailed,
    )
    from stratagem.errors import (
        ReplicaLost as ReplicaLost,
    )
    from stratagem.errors import (
        ReplicaMissing as ReplicaMissing,
    )
    from stratagem.errors import (
        ReplicaStalled as ReplicaStalled,
    )
    from stratagem.errors import (
        StratagemError as StratagemError,
    )
    from stratagem.errors import (
        UsageError as UsageError,
    )
    from stratagem.frontends import callbacks as callbacks
    from stratagem.frontends.model import Model as Model
    from stratagem.plan.notebook import plan as plan
    from stratagem.rules.ramp import Ramp as Ramp
    from stratagem.rules.staleness import DelayCompensated as DelayCompensated
    from stratagem.rules.staleness import Drop as Drop
    from stratagem.rules.staleness import GapAware as GapAware
    from stratagem.rules.staleness import LowerRate as LowerRate
    from stratagem.rules.staleness import Policy as Policy
    from stratagem.rules.staleness import ScaleDown as ScaleDown
    from stratagem.rules.stats import Stats as Stats
    from stratagem.rules.updates import Asynchronous as Asynchronous
    from stratagem.rules.updates import Synchronous as Synchronous
    from stratagem.state.partition import FixedShards as FixedShards
    from stratagem.state.partition import MaxSize as MaxSize
    from stratagem.state.partition import MinSize as MinSize
    from stratagem.strategies.agreement import Patience as Patience
    from stratagem.strategies.central_storage import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from stratagem.strategies.cross_device import (
        CrossDeviceOps as CrossDeviceOps,
    )
    from stratagem.strategies.cross_device import (
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    )
    from stratagem.strategies.cross_device import (
        NcclAllReduce as NcclAllReduce,
    )
    from stratagem.strategies.cross_device import (
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from stratagem.strategies.cross_device import (
        RingAllReduce as RingAllReduce,
    )
    from stratagem.strategies.cross_device import (
        SharedMemoryAllReduce as SharedMemoryAllReduce,
    )
    from stratagem.strategies.mirrored import (
        MirroredStrategy as MirroredStrategy,
    )
    from stratagem.strategies.mirrored import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from stratagem.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from stratagem.strategies.parameters.local_cluster import LocalCluster as LocalCluster
    from stratagem.strategies.replica import Replica as Replica
    from stratagem.strategies.replica import current_replica as current_replica
    from stratagem.strategies.strategy import Strategy as Strategy
    from stratagem.strategies.strategy import get_strategy as get_strategy

__all__ = ["__version__", *sorted([*_WHERE, *_MODULES])]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
        importlib.import_module("stratagem.frontends.keras.unscoped")  # it watches for plans
    elif name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        if _WHERE[name].startswith("stratagem.strategies."):
            importlib.import_module("stratagem.frontends.keras.scope")  # it watches for scopes
    else:
        raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
