"""A replica's placement: what it needs to connect to the other replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch

from stratagem.cluster.membership import Membership
from stratagem.errors import ClusterError
from stratagem.figures.meter import METER
from stratagem.training.cross_device import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
    ReplicaHardware,
    possible,
)
from stratagem.training.devices import limit_memory, place
from stratagem.training.replica import Replica
from stratagem.wire.collective import Alone, Collective
from stratagem.wire.device_kinds import kind_of
from stratagem.wire.lateness import AGAIN, FIRST, Limit, say_late
from stratagem.wire.process_group import Meeting, MeetingStore
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.torch_dist import HierarchicalCollective, OneDeviceCollective, TorchCollective

T = TypeVar("T")

#: how long one collective may take; a dead or stopped peer is noticed by the membership long before
PATIENCE = timedelta(minutes=30)
_LONG = 1e9  # seconds; torch counts milliseconds
_ON_THEIR_WAY = 2.0  # seconds in which bytes of a member that has left may still arrive


@dataclass(frozen=True)
class Placement:
    """One replica's place; plain data, so that it can be sent to a follower."""

    rank: int
    #: the rank of the process that leads this replica
    leader: int
    names: tuple[str, ...]
    devices: tuple[str, ...]
    hosts: tuple[str, ...]
    hardware: ReplicaHardware
    op: CrossDeviceOps
    #: the address of this host on which its replicas listen
    interface: str = "127.0.0.1"
    #: shared-memory control block, for replicas of one machine
    segment: str | None = None
    #: the name under which process groups exchange their addresses over the membership
    store: str | None = None
    threads: int = 0
    #: seconds that a live replica may keep the others waiting
    step: float = PATIENCE.total_seconds()
    #: how often the membership has changed, by the chief's count
    generation: int = 0

    @property
    def size(self) -> int:
        return len(self.devices)

    def candidates(self) -> tuple[CrossDeviceOps, ...]:
        """Operations that these replicas can run, the chosen one first."""
        return tuple(dict.fromkeys([self.op, *possible(self.hardware)]))

    def of(self, rank: int) -> Placement:
        """Return the placement of another replica of the same group."""
        return replace(self, rank=rank)


class WaitWatcher:
    """Called while a replica waits for another: raises trouble, and logs lateness."""

    def __init__(self, membership: Membership, names: tuple[str, ...], limit: Limit) -> None:
        self._membership = membership
        self._names = names
        self._limit = limit
        self._next = FIRST

    def __call__(self, rank: int, waited: float) -> None:
        self._membership.raise_if_gone()
        if waited >= self._limit.seconds:
            self._limit.give_up(self._names[rank], waited)
        if waited < 1.0:
            self._next = FIRST
        elif waited >= self._next:
            self._next = waited + AGAIN
            say_late(self._names[rank], waited)


def attentively(make: Callable[[], T], watch: Callable[[], None], device: torch.device) -> T:
    """Run a wait inside torch, which ignores Ctrl-C and dead peers, in a thread of its own."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            kind_of(device).use(device)  # every thread has a current GPU of its own
            done.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="stratagem-meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        watch()
    if failed:
        raise failed[0]
    return done[0]


def connect_replica(placement: Placement, membership: Membership) -> Replica:
    """Connect to the other replicas. Collective."""
    name = placement.devices[placement.rank]
    with kind_of(name).seat(place(name), placement.rank, placement.size) as device:
        limit_memory(device)
        return _connect_replica(placement, membership, device)


def _connect_replica(placement: Placement, membership: Membership, device: torch.device) -> Replica:
    watch = membership.raise_if_trouble

    def connect(name: str, op: CrossDeviceOps) -> Collective:
        return attentively(lambda: _connect(placement, name, op, membership), watch, device)

    collective = connect("main", placement.op)
    METER.generation = placement.generation
    return Replica(
        placement.rank,
        placement.size,
        device,
        placement.names[placement.rank],
        collective,
        membership,
        connect,
        local_index=placement.rank - placement.leader,
        ops=placement.candidates(),
    )


def _connect(
    placement: Placement, name: str, op: CrossDeviceOps, membership: Membership
) -> Collective:
    if placement.size == 1:
        return Alone()
    late = Limit(membership, placement.step)
    if op.shares_memory:
        if placement.segment is None or name != "main":
            raise ClusterError("there is one shared-memory collective a team, made at its start.")
        control = Segment.attach(placement.segment)
        watch = WaitWatcher(membership, placement.names, late)
        return SharedMemoryCollective(
            placement.rank, placement.size, control, watch, placement.names
        )
    backend = placement.hardware.backend
    assert placement.store is not None
    store = MeetingStore(membership, f"{placement.store}/{name}", PATIENCE)
    # torch's own timeout names no rank, so ours is shorter
    limit = max(PATIENCE, timedelta(seconds=min(placement.step, _LONG))) + timedelta(minutes=1)

    def watch_group(waited: float) -> None:
        membership.raise_if_trouble()
        if waited > _ON_THEIR_WAY:
            membership.raise_if_gone()

    meeting = Meeting(store, placement.interface, limit, watch_group, placement.names, late)
    arguments = (placement.rank, placement.size, backend, meeting, membership)
    if isinstance(op, HierarchicalCopyAllReduce):
        layered = HierarchicalCollective(*arguments)
        layered.join_packs(op.packs(list(placement.hosts)))
        return layered
    if isinstance(op, ReductionToOneDevice):
        single = OneDeviceCollective(*arguments)
        single.root = op.root(list(placement.devices))
        return single
    return TorchCollective(*arguments)
