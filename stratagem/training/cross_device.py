"""Cross-device operations: the kinds of all-reduce that add gradients up.

MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce())
MirroredStrategy(cross_device_ops="auto")       # measure on this model, take the fastest
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from stratagem.errors import UsageError
from stratagem.training.devices import canonical
from stratagem.wire.device_kinds import kind_of


@dataclass(frozen=True)
class CrossDeviceOps:
    """Base of the choices below; each gives the plain sum for every number of replicas."""

    shares_memory: ClassVar[bool] = False


@dataclass(frozen=True)
class NcclAllReduce(CrossDeviceOps):
    """NVIDIA's library, between GPUs."""


@dataclass(frozen=True)
class RingAllReduce(CrossDeviceOps):
    """Chunks travel in a circle: Gloo on CPUs and between hosts, NCCL on GPUs."""


@dataclass(frozen=True)
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """First within packs, then between the first of each; a pack per host, else `num_packs`."""

    num_packs: int | None = None

    def __post_init__(self) -> None:
        if self.num_packs is not None and self.num_packs < 1:
            raise UsageError(f"num_packs is {self.num_packs}; it must be 1 or more.")

    def packs(self, hosts: list[str]) -> list[list[int]]:
        """Return the ranks of each pack; `hosts[r]` is the host of rank r."""
        if self.num_packs is None and len(set(hosts)) > 1:
            return [[r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]
        size = len(hosts)
        count = min(size, self.num_packs or 2)
        bounds = [size * i // count for i in range(count + 1)]
        return [list(range(a, b)) for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class ReductionToOneDevice(CrossDeviceOps):
    """One replica, the first unless named, adds all gradients up and sends the sum back."""

    reduce_to_device: str | None = None

    def root(self, devices: list[str]) -> int:
        if self.reduce_to_device is None:
            return 0
        wanted = canonical(self.reduce_to_device)
        if wanted not in devices:
            raise UsageError(
                f"reduce_to_device={self.reduce_to_device!r} is not among this strategy's "
                f"devices: {', '.join(devices)}."
            )
        return devices.index(wanted)


@dataclass(frozen=True)
class SharedMemoryAllReduce(CrossDeviceOps):
    """CPU replicas of one machine add each other's gradients in place."""

    shares_memory = True


_NAMES: dict[str, CrossDeviceOps] = {
    "nccl": NcclAllReduce(),
    "ring": RingAllReduce(),
    "hierarchical": HierarchicalCopyAllReduce(),
    "one_device": ReductionToOneDevice(),
    "shared_memory": SharedMemoryAllReduce(),
}


def named(choice: CrossDeviceOps | str | None) -> CrossDeviceOps | str | None:
    """Return the operation with a name; None and "auto" stay as they are."""
    if choice is None or choice == "auto" or isinstance(choice, CrossDeviceOps):
        return choice
    if isinstance(choice, str) and choice.lower() in _NAMES:
        return _NAMES[choice.lower()]
    known = ", ".join(repr(name) for name in ["auto", *_NAMES])
    raise UsageError(f"cross_device_ops={choice!r} is not known; choose one of {known}.")


@dataclass(frozen=True)
class ReplicaHardware:
    """The hardware facts that decide which operations the replicas can run."""

    kinds: frozenset[str]
    one_host: bool
    #: whether every replica has a device of its own: NCCL refuses to share a GPU
    apart: bool

    @property
    def backend(self) -> str:
        """torch's backend: that of the devices' kind, or Gloo, which works between any."""
        (kind,) = self.kinds if len(self.kinds) == 1 else ("cpu",)
        return kind_of(kind).backend if self.apart else "gloo"


def possible(hardware: ReplicaHardware) -> list[CrossDeviceOps]:
    """Return the operations that these replicas can run, the usual choice first."""
    general = [RingAllReduce(), HierarchicalCopyAllReduce(), ReductionToOneDevice()]
    if hardware.backend == "tpu_dist":
        return general[:1]  # its first group must have all replicas, and no other was tried
    if hardware.backend == "nccl":
        return [NcclAllReduce(), *general[1:]]
    if hardware.kinds == {"cpu"} and hardware.one_host:
        return [SharedMemoryAllReduce(), *general]
    return list(general)


def check(op: CrossDeviceOps, hardware: ReplicaHardware) -> None:
    """Refuse an operation that these replicas cannot run."""
    if isinstance(op, NcclAllReduce) and hardware.backend != "nccl":
        where = ", ".join(sorted(hardware.kinds)) + (
            "" if hardware.apart else ", several on one GPU"
        )
        raise UsageError(
            "NcclAllReduce works between NVIDIA GPUs only, each with one replica, and these "
            f"replicas run on {where}; use RingAllReduce(), or leave cross_device_ops out."
        )
    if hardware.backend == "tpu_dist" and op != RingAllReduce():
        raise UsageError(
            f"TPUs add up by their own collective, and {type(op).__name__} is none of it; leave "
            "cross_device_ops out."
        )
    if op.shares_memory and (hardware.kinds != {"cpu"} or not hardware.one_host):
        raise UsageError(
            "SharedMemoryAllReduce works between CPU replicas of one machine only; use "
            "RingAllReduce() or NcclAllReduce(), or leave cross_device_ops out."
        )
