"""stratagem: every way to spread neural-network training over devices and machines, one line apart.

Names are loaded when first used, so that `stratagem --help` need not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratagem.frontends.keras.backend import choose as _choose_keras_backend
from stratagem.plan.front_ends import opened_by as _plans_open_front_ends_by

_choose_keras_backend()

__version__ = "0.1.0"

#: where each public name is defined
_HOMES = {
    "cluster.spec": "ClusterSpec Place Task",
    "cluster.tpu_resolver": "TPUClusterResolver",
    "codecs.int8": "Int8",
    "codecs.low_rank": "PowerSGD",
    "codecs.sign": "Sign",
    "codecs.topk": "TopK",
    "errors": "ClusterError DeviceError HandshakeError NotDistributable ReplicaError ReplicaFailed "
    "ReplicaLost ReplicaMissing ReplicaStalled StratagemError UsageError",
    "frontends.ensemble": "Ensemble",
    "frontends.model": "Model",
    "frontends.quantize": "quantize",
    "launch.notebook_sweep": "sweep",
    "launch.ray_cluster": "RayCluster",
    "rules.cadence": "DiLoCo EveryStep Gossip LocalSteps Outer",
    "rules.stats": "Stats",
    "rules.updates": "Asynchronous DelayCompensated Drop GapAware LowerRate Policy Ramp ScaleDown "
    "Synchronous",
    "servers.local_cluster": "LocalCluster",
    "state.checkpoint_folder": "Checkpoints",
    "state.partition": "FixedShards MaxSize MinSize",
    "strategies.central_storage": "CentralStorageStrategy",
    "strategies.mesh": "Mesh",
    "strategies.mirrored": "MirroredStrategy MultiWorkerMirroredStrategy",
    "strategies.parameter_server": "ParameterServerStrategy",
    "strategies.pipeline": "PipelineStrategy",
    "strategies.sharded": "ShardedStrategy",
    "strategies.strategy": "Strategy get_strategy",
    "strategies.tensor_parallel": "TensorParallelStrategy",
    "strategies.tpu": "TPUStrategy",
    "training.agreement": "Patience",
    "training.cross_device": "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce "
    "ReductionToOneDevice RingAllReduce SharedMemoryAllReduce",
    "training.replica": "Replica current_replica",
}
_WHERE = {name: f"stratagem.{home}" for home, names in _HOMES.items() for name in names.split()}
_MODULES = {
    "callbacks": "stratagem.frontends.callbacks",
    "experimental": "stratagem.experimental",
    "plan": "stratagem.plan",
}

if TYPE_CHECKING:
    from stratagem import experimental as experimental
    from stratagem.cluster.spec import ClusterSpec as ClusterSpec
    from stratagem.cluster.spec import Place as Place
    from stratagem.cluster.spec import Task as Task
    from stratagem.cluster.tpu_resolver import TPUClusterResolver as TPUClusterResolver
    from stratagem.codecs.int8 import Int8 as Int8
    from stratagem.codecs.low_rank import PowerSGD as PowerSGD
    from stratagem.codecs.sign import Sign as Sign
    from stratagem.codecs.topk import TopK as TopK
    from stratagem.errors import ClusterError as ClusterError
    from stratagem.errors import DeviceError as DeviceError
    from stratagem.errors import HandshakeError as HandshakeError
    from stratagem.errors import NotDistributable as NotDistributable
    from stratagem.errors import ReplicaError as ReplicaError
    from stratagem.errors import ReplicaFailed as ReplicaFailed
    from stratagem.errors import ReplicaLost as ReplicaLost
    from stratagem.errors import ReplicaMissing as ReplicaMissing
    from stratagem.errors import ReplicaStalled as ReplicaStalled
    from stratagem.errors import StratagemError as StratagemError
    from stratagem.errors import UsageError as UsageError
    from stratagem.frontends import callbacks as callbacks
    from stratagem.frontends.ensemble import Ensemble as Ensemble
    from stratagem.frontends.model import Model as Model
    from stratagem.frontends.quantize import quantize as quantize
    from stratagem.launch.notebook_sweep import sweep as sweep
    from stratagem.launch.ray_cluster import RayCluster as RayCluster
    from stratagem.plan.notebook import plan as plan
    from stratagem.rules.cadence import DiLoCo as DiLoCo
    from stratagem.rules.cadence import EveryStep as EveryStep
    from stratagem.rules.cadence import Gossip as Gossip
    from stratagem.rules.cadence import LocalSteps as LocalSteps
    from stratagem.rules.cadence import Outer as Outer
    from stratagem.rules.stats import Stats as Stats
    from stratagem.rules.updates import Asynchronous as Asynchronous
    from stratagem.rules.updates import DelayCompensated as DelayCompensated
    from stratagem.rules.updates import Drop as Drop
    from stratagem.rules.updates import GapAware as GapAware
    from stratagem.rules.updates import LowerRate as LowerRate
    from stratagem.rules.updates import Policy as Policy
    from stratagem.rules.updates import Ramp as Ramp
    from stratagem.rules.updates import ScaleDown as ScaleDown
    from stratagem.rules.updates import Synchronous as Synchronous
    from stratagem.servers.local_cluster import LocalCluster as LocalCluster
    from stratagem.state.checkpoint_folder import Checkpoints as Checkpoints
    from stratagem.state.partition import FixedShards as FixedShards
    from stratagem.state.partition import MaxSize as MaxSize
    from stratagem.state.partition import MinSize as MinSize
    from stratagem.strategies.central_storage import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from stratagem.strategies.mesh import Mesh as Mesh
    from stratagem.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from stratagem.strategies.mirrored import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from stratagem.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from stratagem.strategies.pipeline import PipelineStrategy as PipelineStrategy
    from stratagem.strategies.sharded import ShardedStrategy as ShardedStrategy
    from stratagem.strategies.strategy import Strategy as Strategy
    from stratagem.strategies.strategy import get_strategy as get_strategy
    from stratagem.strategies.tensor_parallel import (
        TensorParallelStrategy as TensorParallelStrategy,
    )
    from stratagem.strategies.tpu import TPUStrategy as TPUStrategy
    from stratagem.training.agreement import Patience as Patience
    from stratagem.training.cross_device import CrossDeviceOps as CrossDeviceOps
    from stratagem.training.cross_device import (
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    )
    from stratagem.training.cross_device import NcclAllReduce as NcclAllReduce
    from stratagem.training.cross_device import ReductionToOneDevice as ReductionToOneDevice
    from stratagem.training.cross_device import RingAllReduce as RingAllReduce
    from stratagem.training.cross_device import SharedMemoryAllReduce as SharedMemoryAllReduce
    from stratagem.training.replica import Replica as Replica
    from stratagem.training.replica import current_replica as current_replica

__all__ = ["__version__", *sorted([*_WHERE, *_MODULES])]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        if _WHERE[name].startswith("stratagem.strategies."):
            importlib.import_module("stratagem.frontends.keras.scope")  # it watches for scopes
    else:
        raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
    globals()[name] = value
    return value


@_plans_open_front_ends_by
def _open_front_ends() -> Any:
    """Have `fit` of every front end watched, and return the class that compiles a plain module."""
    importlib.import_module("stratagem.frontends.keras.scope")
    return importlib.import_module("stratagem.frontends.model").Model


def __dir__() -> list[str]:
    return __all__
