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
    "stratagem.strategies.cross_device": [
        "CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice",
        "RingAllReduce", "SharedMemoryAllReduce",
    ],
    "stratagem.strategies.mirrored": ["MirroredStrategy", "MultiWorkerMirroredStrategy"],
    "stratagem.strategies.replica": ["Replica", "current_replica"],
    "stratagem.strategies.strategy": ["Strategy", "get_strategy"],
    "stratagem.strategies.team": ["Patience"],
}  # fmt: skip
_WHERE = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from stratagem.cluster.spec import ClusterSpec, Place, Task

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
