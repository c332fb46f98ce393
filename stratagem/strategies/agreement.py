"""How the processes of a job agree: who brings which devices, and where all replicas meet."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.cluster.cores import cores
from stratagem.cluster.dial import is_loopback
from stratagem.cluster.handshake import SECRET_VARIABLE, job_secret
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.rendezvous import form
from stratagem.cluster.spec import Place
from stratagem.errors import ClusterError
from stratagem.strategies import cross_device
from stratagem.strategies.cross_device import (
    CrossDeviceOps,
    Ground,
    ReductionToOneDevice,
    SharedMemoryAllReduce,
)
from stratagem.strategies.devices import identity
from stratagem.strategies.seat import Seat, Store
from stratagem.strategies.settings import Settings
from stratagem.wire.segment import Segment, host_identity
from stratagem.wire.shared_memory import SharedMemoryCollective

log = logging.getLogger("stratagem")


@dataclass(frozen=True)
class Patience:
    """How long to wait, in seconds."""

    #: for tasks to arrive
    arrive: float = 300.0
    #: for one that stopped answering
    answer: float = 60.0
    #: for one that answers, but does not come to the step where the others are
    step: float = 1800.0


@dataclass(frozen=True)
class Party:
    """One process, as it comes to the agreement."""

    devices: tuple[str, ...]
    settings: Settings
    place: Place | None
    patience: Patience

    def join(self) -> Membership:
        """Meet the other tasks of the cluster; a process without one is alone."""
        if self.place is None:
            return Membership.alone()
        spec = self.place.spec
        if not os.environ.get(SECRET_VARIABLE) and not is_loopback(self.place.chief_address):
            log.warning(
                "%s is not set: whoever reaches %s and knows this cluster can join the job. Set it "
                "to the same random text on every task.", SECRET_VARIABLE, self.place.chief_address,
            )  # fmt: skip
        return form(
            spec, self.place.task, secret=job_secret(os.environ, spec.to_json()),
            limit=self.patience.arrive, give_up=self.patience.answer,
        )  # fmt: skip

    def interface(self) -> str:
        """The address of this host through which the others of the cluster reach it."""
        if self.place is None or len(self.place.spec.training_tasks()) == 1:
            return "127.0.0.1"
        host, _, port = self.place.chief_address.rpartition(":")
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; asks the routing table
            return str(probe.getsockname()[0])

    def choose(self, ground: Ground) -> CrossDeviceOps:
        op = self.settings.op
        if isinstance(op, CrossDeviceOps):
            cross_device.check(op, ground)
            return op
        return cross_device.possible(ground)[0]


@dataclass(frozen=True)
class Offer:
    """What the chief provides: a store to meet at, a control block in shared memory."""

    store: Store | None = None
    control: Segment | None = None


def agree(party: Party, cluster: Membership) -> tuple[Seat, Offer]:
    """Tell each other what each process brings; the chief offers the meeting places. Collective.

    The offer must be kept until every replica has taken its seat.
    """
    facts = cluster.exchange(
        {"devices": list(party.devices), "host": host_identity(),
         "places": [identity(device) for device in party.devices]}, party.patience.arrive,
    )  # fmt: skip
    counts = [len(_strings(fact["devices"])) for fact in facts]
    devices = tuple(d for fact in facts for d in _strings(fact["devices"]))
    hosts = tuple(str(fact["host"]) for fact in facts for _ in _strings(fact["devices"]))
    places = [p for fact in facts for p in _strings(fact["places"])]
    ground = Ground(
        kinds=frozenset(device.partition(":")[0] for device in devices),
        one_host=len(set(hosts)) == 1,
        apart=len(set(zip(hosts, places, strict=True))) == len(places),
    )
    op = party.choose(ground)
    if isinstance(op, ReductionToOneDevice):
        op.root(list(devices))  # raises here, before any other replica is asked
    offer = _offer(party, op, len(devices)) if cluster.rank == 0 else Offer()
    told = _settle(party, cluster, op, offer)
    first = sum(counts[: cluster.rank])
    seat = Seat(
        rank=first, leader=first, names=_names(party.place, counts), devices=devices, hosts=hosts,
        ground=ground, op=op, interface=party.interface(), segment=_text(told["control"]),
        store=_text(told["store"]), threads=_threads(ground, hosts.count(hosts[first])),
        step=party.patience.step,
    )  # fmt: skip
    return seat, offer


def _offer(party: Party, op: CrossDeviceOps, size: int) -> Offer:
    if size == 1:
        return Offer()
    shared = isinstance(op, SharedMemoryAllReduce)
    return Offer(
        Store(party.interface()) if party.settings.op == "auto" or not shared else None,
        Segment(SharedMemoryCollective.control_size(size)) if shared else None,
    )


def _settle(
    party: Party, cluster: Membership, op: CrossDeviceOps, offer: Offer
) -> dict[str, object]:
    """The chief's offer, once it is clear that everybody means to add up in the same way."""
    chosen = party.settings
    offers = cluster.exchange(
        {"store": offer.store and offer.store.address,
         "control": offer.control and offer.control.handle,
         "op": "auto" if chosen.op == "auto" else repr(op),
         "wire": f"wire={chosen.wire or 'float32'!r}",
         "sync_batchnorm": f"sync_batchnorm={chosen.sync_batchnorm!r}"}, party.patience.arrive,
    )  # fmt: skip
    for key, (what, option) in _ALIKE.items():
        _same([str(each[key]) for each in offers], cluster.members, what, option)
    return offers[0]


#: what every task must have chosen alike: what they do with it, and the option's name
_ALIKE = {
    "op": ("add gradients up in the same way", "cross_device_ops (communication)"),
    "wire": ("send gradients in the same type", "wire"),
    "sync_batchnorm": ("normalise batches in the same way", "sync_batchnorm"),
}


def _same(choices: list[str], members: Sequence[Member], what: str, option: str) -> None:
    """Refuse what would have every task wait at another door."""
    if len(set(choices)) > 1:
        both = zip(members, choices, strict=True)
        each = ", ".join(f"{member.name} {choice}" for member, choice in both)
        raise ClusterError(
            f"the tasks do not {what}: {each}. Give every task the same {option}."
        )


def _threads(ground: Ground, replicas_here: int) -> int:
    """Threads a replica, so that CPU replicas of one machine do not fight; 0 leaves torch alone."""
    if ground.kinds != {"cpu"} or replicas_here == 1:
        return 0
    return max(1, cores() // replicas_here)


def _names(place: Place | None, counts: list[int]) -> tuple[str, ...]:
    if place is None:
        return tuple(f"replica {i}" for i in range(sum(counts)))
    names = []
    for task, count in zip(place.spec.training_tasks(), counts, strict=True):
        names.append(str(task))
        names += [f"{task} replica {i}" for i in range(1, count)]
    return tuple(names)


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
