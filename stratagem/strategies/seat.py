"""A seat: everything a replica must know to take its place among the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from stratagem.cluster.membership import Membership
from stratagem.errors import ClusterError
from stratagem.strategies.cross_device import (
    CrossDeviceOps,
    Ground,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
    SharedMemoryAllReduce,
    possible,
)
from stratagem.strategies.devices import place
from stratagem.strategies.gpu_memory import limit_memory
from stratagem.strategies.replica import Replica
from stratagem.wire.collective import Alone, Collective
from stratagem.wire.group import Meeting
from stratagem.wire.lateness import AGAIN, FIRST, Limit, say_late
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.torch_dist import HierarchicalCollective, OneDeviceCollective, TorchCollective

T = TypeVar("T")
_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]

#: how long one collective may take; a dead or stopped peer is noticed by the membership long before
PATIENCE = timedelta(minutes=30)
_LONG = 1e9  # seconds; torch counts milliseconds


@dataclass(frozen=True)
class Seat:
    """One replica's place; plain data, so that it can be sent to a follower."""

    rank: int
    #: the rank of the process that leads this replica
    leader: int
    names: tuple[str, ...]
    devices: tuple[str, ...]
    hosts: tuple[str, ...]
    ground: Ground
    op: CrossDeviceOps
    #: the address of this host on which its replicas listen
    interface: str = "127.0.0.1"
    #: shared-memory control block, for replicas of one machine
    segment: str | None = None
    #: host:port of the chief's store, for process groups
    store: str | None = None
    threads: int = 0
    #: seconds that one which lives may keep the others waiting
    step: float = PATIENCE.total_seconds()

    @property
    def size(self) -> int:
        return len(self.devices)

    def candidates(self) -> tuple[CrossDeviceOps, ...]:
        """Operations that these replicas can run, the chosen one first."""
        return tuple(dict.fromkeys([self.op, *possible(self.ground)]))

    def of(self, rank: int) -> Seat:
        """The same table, another chair."""
        return replace(self, rank=rank)


class Store:
    """The chief's rendezvous point, bound to one interface only."""

    def __init__(self, interface: str) -> None:
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.bind((interface, 0))
        self._listener.listen(512)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.store: c10d.Store = _TCP_STORE(
            host, port, is_master=True, wait_for_workers=False, timeout=PATIENCE,
            master_listen_fd=self._listener.detach(),
        )  # fmt: skip


class Watchman:
    """Looks up while a replica waits for another: trouble is raised, lateness is said aloud."""

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


class _Eye:
    """Looks up while a process group waits.

    A member that has left may still have bytes on their way, so its absence counts only after a
    while.
    """

    _ON_THEIR_WAY = 2.0

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def __call__(self, waited: float) -> None:
        self._membership.raise_if_trouble()
        if waited > self._ON_THEIR_WAY:
            self._membership.raise_if_gone()


def attentively(make: Callable[[], T], watch: Callable[[], None], device: torch.device) -> T:
    """Run what waits inside torch, deaf to Ctrl-C and to dead peers, in a thread of its own."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # every thread has a current GPU of its own
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


def sit(seat: Seat, membership: Membership, store: Store | None = None) -> Replica:
    """Take the seat: connect to the others. Collective."""
    device = place(seat.devices[seat.rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        limit_memory(device)
    watch = membership.raise_if_trouble
    rendezvous = (
        store.store if store is not None else attentively(lambda: _visit(seat.store), watch, device)
    )

    def connect(name: str, op: CrossDeviceOps) -> Collective:
        return attentively(lambda: _connect(seat, name, op, membership, rendezvous), watch, device)

    collective = connect("main", seat.op)
    return Replica(
        seat.rank, seat.size, device, seat.names[seat.rank], collective, membership, connect,
        local_index=seat.rank - seat.leader, ops=seat.candidates(),
    )  # fmt: skip


def _visit(address: str | None) -> c10d.Store | None:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    store: c10d.Store = _TCP_STORE(
        host, int(port), is_master=False, wait_for_workers=False, timeout=PATIENCE
    )
    return store


def _connect(
    seat: Seat, name: str, op: CrossDeviceOps, membership: Membership, rendezvous: c10d.Store | None
) -> Collective:
    if seat.size == 1:
        return Alone()
    late = Limit(membership, seat.step)
    if isinstance(op, SharedMemoryAllReduce):
        if seat.segment is None or name != "main":
            raise ClusterError("there is one shared-memory collective a team, made at its start.")
        control = Segment.attach(seat.segment)
        watch = Watchman(membership, seat.names, late)
        return SharedMemoryCollective(seat.rank, seat.size, control, watch, seat.names)
    backend = "nccl" if seat.ground.nccl else "gloo"
    assert rendezvous is not None
    store = c10d.PrefixStore(name, rendezvous)
    # torch's own limit names nobody, so ours comes first.
    limit = max(PATIENCE, timedelta(seconds=min(seat.step, _LONG))) + timedelta(minutes=1)
    meeting = Meeting(store, seat.interface, limit, _Eye(membership), seat.names, late)
    arguments = (seat.rank, seat.size, backend, meeting, membership)
    if isinstance(op, HierarchicalCopyAllReduce):
        layered = HierarchicalCollective(*arguments)
        layered.join_packs(op.packs(list(seat.hosts)))
        return layered
    if isinstance(op, ReductionToOneDevice):
        single = OneDeviceCollective(*arguments)
        single.root = op.root(list(seat.devices))
        return single
    return TorchCollective(*arguments)

