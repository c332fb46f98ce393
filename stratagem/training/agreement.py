"""How the processes of a job agree: who brings which devices, and where all replicas meet."""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from stratagem.cluster.environment import cores
from stratagem.cluster.generations import Generations
from stratagem.cluster.handshake import secret_for
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.rendezvous import form
from stratagem.cluster.spec import Place
from stratagem.errors import ClusterError
from stratagem.training import cross_device
from stratagem.training.cross_device import (
    CrossDeviceOps,
    ReductionToOneDevice,
    ReplicaHardware,
)
from stratagem.training.devices import identity
from stratagem.training.placement import Placement
from stratagem.training.settings import Settings
from stratagem.wire.segment import Segment, host_identity
from stratagem.wire.shared_memory import SharedMemoryCollective


@dataclass(frozen=True)
class Patience:
    """How long to wait, in seconds."""

    #: for tasks to arrive
    arrive: float = 300.0
    #: for a task that stopped answering
    answer: float = 60.0
    #: for a task that answers, but does not come to the step of the others
    step: float = 1800.0


@dataclass(frozen=True)
class AgreeingProcess:
    """One process of the job, with what it brings to the agreement."""

    devices: tuple[str, ...]
    settings: Settings
    place: Place | None
    patience: Patience
    insecure: bool = False
    #: counts the memberships in which this process has agreed
    numbers: Iterator[int] = field(default_factory=itertools.count, compare=False)

    def join(self) -> Membership:
        """Meet the other tasks of the cluster; a process without one is alone."""
        if self.place is None:
            return Membership.alone()
        place, patience = self.place, self.patience
        limits = {"limit": patience.arrive, "give_up": patience.answer}
        return form(place.spec, place.task, secret=self._secret(place), **limits)

    def generations(self, least: int) -> Generations | None:
        """Meet the tasks of an elastic job; None where there is no other task."""
        if self.place is None or len(self.place.spec.training_tasks()) == 1:
            return None
        return Generations(
            self.place.spec,
            self.place.task,
            secret=self._secret(self.place),
            limit=self.patience.arrive,
            give_up=self.patience.answer,
            least=least,
            hub=self.place.hub,
        )

    def _secret(self, place: Place) -> bytes:
        ports = [place.chief_address] if len(place.spec.training_tasks()) > 1 else []
        return secret_for(place.spec, ports, insecure=self.insecure)

    def interface(self) -> str:
        """The address at which the other hosts of the cluster reach this host."""
        if self.place is None or len(self.place.spec.training_tasks()) == 1:
            return "127.0.0.1"
        host, _, port = self.place.chief_address.rpartition(":")
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; asks the routing table
            return str(probe.getsockname()[0])

    def choose(self, hardware: ReplicaHardware) -> CrossDeviceOps:
        op = self.settings.op
        if isinstance(op, CrossDeviceOps):
            cross_device.check(op, hardware)
            return op
        return cross_device.possible(hardware)[0]


def agree(process: AgreeingProcess, cluster: Membership) -> tuple[Placement, Segment | None]:
    """Exchange what each process brings, and what the chief offers: a name for the rendezvous, a
    control block in shared memory. Collective.

    The chief must keep the returned block until every replica has connected.
    """
    facts = cluster.exchange(
        {
            "devices": list(process.devices),
            "host": host_identity(),
            "places": [identity(device) for device in process.devices],
        },
        process.patience.arrive,
    )
    counts = [len(_strings(fact["devices"])) for fact in facts]
    devices = tuple(d for fact in facts for d in _strings(fact["devices"]))
    hosts = tuple(str(fact["host"]) for fact in facts for _ in _strings(fact["devices"]))
    places = [p for fact in facts for p in _strings(fact["places"])]
    hardware = ReplicaHardware(
        kinds=frozenset(device.partition(":")[0] for device in devices),
        one_host=len(set(hosts)) == 1,
        apart=len(set(zip(hosts, places, strict=True))) == len(places),
    )
    op = process.choose(hardware)
    if isinstance(op, ReductionToOneDevice):
        op.root(list(devices))  # raises here, before any other replica is asked
    control, store = None, None
    if cluster.rank == 0 and len(devices) > 1:
        if op.shares_memory:
            control = Segment(SharedMemoryCollective.control_size(len(devices)))
        if control is None or process.settings.op == "auto":
            store = secrets.token_hex(4)
    settled = _settle(process, cluster, op, {"store": store, "control": control and control.handle})
    first = sum(counts[: cluster.rank])
    placement = Placement(
        rank=first,
        leader=first,
        names=_names(process.place, cluster.members, counts),
        devices=devices,
        hosts=hosts,
        hardware=hardware,
        op=op,
        interface=process.interface(),
        segment=_text(settled["control"]),
        store=_text(settled["store"]),
        threads=_threads(hardware, hosts.count(hosts[first])),
        step=process.patience.step,
        generation=settled["generation"] if isinstance(settled["generation"], int) else 0,
    )
    return placement, control


def _settle(
    process: AgreeingProcess, cluster: Membership, op: CrossDeviceOps, offer: Mapping[str, object]
) -> dict[str, object]:
    """Return the chief's offer, after checking that all processes have the same settings."""
    offers = cluster.exchange(
        {**offer, "generation": next(process.numbers), **_described(process.settings, op)},
        process.patience.arrive,
    )
    for key, (what, option) in _ALIKE.items():
        _same([str(each[key]) for each in offers], cluster.members, what, option)
    return offers[0]


def _described(settings: Settings, op: CrossDeviceOps) -> dict[str, str]:
    """Every setting in words, by its name."""
    words = {
        each.name: f"{each.name}={getattr(settings, each.name)!r}" for each in fields(settings)
    }
    del words["committer"]  # follows from `sync`
    return words | {
        "op": "auto" if settings.op == "auto" else repr(op),
        "wire": f"wire={settings.wire or 'float32'!r}",
        "sync": f"sync={settings.sync or 'EveryStep()'}",
    }


#: settings, all of which must be the same on every task: what tasks do by them, and the option
_ALIKE = {
    "op": ("add gradients up in the same way", "cross_device_ops (communication)"),
    "wire": ("send gradients in the same type", "wire"),
    "sync": ("meet in the same steps", "sync"),
    "sync_batchnorm": ("normalise batches in the same way", "sync_batchnorm"),
    "sharded": ("divide parameters in the same way", "strategy, ShardedStrategy or another"),
    "served": ("keep parameters in the same place", "strategy, ParameterServerStrategy or another"),
    "elastic": ("let replicas leave in the same way", "elastic"),
    "pipeline": ("split the model in the same way", "strategy, PipelineStrategy or another"),
    "tensor": ("divide layers in the same way", "strategy, TensorParallelStrategy or another"),
}


def _same(choices: list[str], members: Sequence[Member], what: str, option: str) -> None:
    """Refuse tasks whose settings differ."""
    if len(set(choices)) > 1:
        both = zip(members, choices, strict=True)
        each = ", ".join(f"{member.name} {choice}" for member, choice in both)
        raise ClusterError(f"the tasks do not {what}: {each}. Give every task the same {option}.")


def _threads(hardware: ReplicaHardware, replicas_here: int) -> int:
    """Return the number of threads of a CPU replica; 0 leaves torch's own."""
    if hardware.kinds != {"cpu"} or replicas_here == 1:
        return 0
    return max(1, cores() // replicas_here)


def _names(place: Place | None, members: Sequence[Member], counts: list[int]) -> tuple[str, ...]:
    if place is None:
        return tuple(f"replica {i}" for i in range(sum(counts)))
    names = []
    for member, count in zip(members, counts, strict=True):
        names.append(member.name)
        names += [f"{member.name} replica {i}" for i in range(1, count)]
    return tuple(names)


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
