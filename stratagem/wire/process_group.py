"""One torch process group, reduced to the four moves that the cross-device algorithms need.

Groups are made directly, never through `init_process_group`: that one is global to the process
(so two strategies could not live side by side), replaces `sys.excepthook`, and makes newer Keras
wrap models in DDP. Sixteen-bit tensors travel as they are and are added up in fp32.
"""

from __future__ import annotations

import base64
import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from stratagem.cluster.membership import Membership
from stratagem.compat.torch_names import gloo_options, nccl_options, registered_group
from stratagem.errors import DeviceError
from stratagem.figures.meter import METER
from stratagem.wire import link_time
from stratagem.wire.collective import HALF, Pending, add_up
from stratagem.wire.lateness import AGAIN, FIRST, Lateness, Limit, say_late
from stratagem.wire.point_to_point import BackgroundWork, pass_on, sum_half
from stratagem.wire.port_filter import listening, shut

#: between two looks after members: only neighbours in a ring see a death by themselves, and nobody
#: one that joins; who has waited long looks less often
_SOON, _GLANCE = timedelta(milliseconds=4), timedelta(milliseconds=20)
_LONG = 0.2  # seconds
_TAGS = 1 << 30  # of single messages; Gloo counts in 32 bits


@dataclass(frozen=True)
class Meeting:
    """Where a group comes together: a store, the address to listen on, and a time limit."""

    store: Any
    hostname: str
    limit: timedelta
    #: called with the seconds waited so far; raises when a member is in trouble
    watch: Callable[[float], None]
    #: every replica's name, by rank
    names: tuple[str, ...] = ()
    #: how long a member may be late; None for as long as `limit` lasts
    late: Limit | None = None


class ProcessGroup:
    """Some replicas, by their place in this group: 0 .. size-1."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        backend: str,
        meeting: Meeting,
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._backend, self._watch = backend, meeting.watch
        self._turn = self._tag = self._reserved = 0
        self._late = meeting.late
        #: what Gloo has begun and may not have ended
        self._works: deque[Any] = deque()
        self._store = meeting.store  # torch's prefix does not keep a Python object alive
        store = c10d.PrefixStore(name, meeting.store)
        self._names = [meeting.names[r] for r in members or range(len(meeting.names))]
        self._lateness = Lateness(store, rank, self._names, meeting.late)
        if backend == "nccl":
            options = nccl_options(meeting.limit)
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        elif backend != "gloo":
            self._group = registered_group(backend, store, rank, size, meeting.limit)
            if self._group is None:
                raise DeviceError(f"nobody has registered the collective {backend!r} with torch.")
        else:
            device, ports = listening(partial(_device, meeting.hostname))
            options = gloo_options(meeting.limit, device)
            made = partial(dist.ProcessGroupGloo, store, rank, size, options)
            self._group = link_time.watched(made)
            shut(ports, _published(store, rank))
            _release()
            weakref.finalize(self, _let_go, self._group, self._works, os.getpid())

    def begin(self, work: Any) -> Any:
        """Know of work that has begun, so that this group outlives it."""
        if self._backend == "gloo":
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.append(work)
        return work

    def wait(self, work: Any) -> None:
        """Wait for work of this group, with an eye on its members.

        Gloo itself would wait for a stopped peer until its time limit, and its `abort` wakes
        nobody. (For NCCL this only makes the GPU's stream wait.)
        """
        self._turn += 1
        since = METER.begin_wait()
        try:
            self._wait(work)
        finally:
            METER.end_wait(since)

    def _wait(self, work: Any) -> None:
        started, glance = time.monotonic(), _SOON
        while self._backend == "gloo" and not work.is_completed():
            try:
                work.wait(glance)
            except RuntimeError:
                if work.is_completed():
                    break  # meanwhile; the last wait below tells how it went
                waited = time.monotonic() - started
                glance = _SOON if waited < _LONG else _GLANCE
                self._watch(waited)
                self._lateness.waiting(self._turn, waited)
        work.wait()

    def _do(self, work: Any) -> None:
        self.wait(self.begin(work))

    def sum(self, flat: Tensor) -> Pending:
        """Add up over the group, in place."""
        if self.size == 1:
            return Pending()
        METER.bytes += flat.nbytes
        # Gloo, too, adds two numbers in fp32 and rounds them once, but of more each sum
        half = flat.dtype in HALF and (self.size > 2 or self._backend != "gloo")
        if half and self._backend == "gloo" and flat.device.type == "cpu":
            self._tag = (self._tag + 2) % _TAGS
            errand = self.begin(BackgroundWork(sum_half, self._group, self.rank, flat, self._tag))
            return Pending(lambda: self.wait(errand))
        if half:
            self._sum_half(flat)
            return Pending()
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        work = self.begin(self._group.allreduce([flat], options))
        return Pending(lambda: self.wait(work))

    def _sum_half(self, flat: Tensor) -> None:
        """Scatter the chunks, add each in fp32 on one member, gather the rounded sums."""
        count, size = flat.numel(), self.size
        chunk = -(-count // size)
        sent = flat.new_zeros(size * chunk)
        sent[:count].copy_(flat)
        received = torch.empty_like(sent)
        self._do(self._group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()))
        total = add_up(received.view(size, chunk))
        parts = list(sent.view(size, chunk).unbind(0))
        self._do(self._group.allgather([parts], [total]))
        flat.copy_(sent[:count])

    def reduce_to(self, flat: Tensor, root: int) -> None:
        """Leave the group's sum in the root's tensor; the others' content is undefined."""
        if self.size == 1:
            return
        METER.bytes += flat.nbytes
        if flat.dtype in HALF:
            gather = dist.GatherOptions()
            gather.rootRank = root
            parts = [torch.empty_like(flat) for _ in range(self.size)] if self.rank == root else []
            self._do(self._group.gather([parts] if parts else [], [flat], gather))
            if parts:
                flat.copy_(add_up(torch.stack(parts)))
            return
        options: Any = dist.ReduceOptions()
        options.rootRank = root
        options.reduceOp = dist.ReduceOp.SUM
        self._do(self._group.reduce([flat], options))

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Overwrite everybody's tensor with the root's."""
        if self.size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._do(self._group.broadcast([flat], options))

    def gather(self, flat: Tensor) -> list[Tensor]:
        """Everybody's tensor of one common size, in order."""
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        self._do(self._group.allgather([parts], [flat]))
        return parts

    def gather_into(self, whole: Tensor, part: Tensor) -> Pending:
        """Everybody's flat part, one behind the other in `whole`."""
        METER.bytes += part.nbytes
        table, row = whole.view(self.size, -1), part.reshape(-1)
        if self._backend != "gloo" or row.device.type != "cpu":
            work = self.begin(self._group.allgather([list(table.unbind(0))], [row]))
            return Pending(lambda: self.wait(work))
        others = _others(self.rank, table)
        pending = self._pass_on([(rank, row) for rank, _ in others], others)
        table[self.rank].copy_(row)
        return pending

    def sum_into(self, part: Tensor, whole: Tensor) -> Pending:
        """This member's part of the sum over the group, added up in the order of ranks."""
        rows = whole.view(self.size, -1)
        received = torch.empty_like(rows)
        pending = self.swap_into(received, rows)

        def finish() -> None:
            pending.wait()
            part.view(-1).copy_(add_up(received))

        return Pending(finish)

    def swap_into(self, received: Tensor, rows: Tensor) -> Pending:
        """Send row r of a table to member r; fills another with what comes from each."""
        METER.bytes += rows.nbytes
        if self._backend != "gloo" or rows.device.type != "cpu":
            options = dist.AllToAllOptions()
            work = self.begin(self._group.alltoall_base(received, rows, [], [], options))
            return Pending(lambda: self.wait(work))
        pending = self._pass_on(_others(self.rank, rows), _others(self.rank, received))
        received[self.rank].copy_(rows[self.rank])
        return pending

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        """Send to some members of a group of Gloo; returns what came from others."""
        METER.bytes += flat.nbytes * len(receivers)
        found = [torch.empty_like(flat) for _ in senders]
        sends = [(rank, flat) for rank in receivers]
        self._pass_on(sends, list(zip(senders, found, strict=True))).wait()
        return found

    def _pass_on(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Pending:
        self._tag = (self._tag + 2) % _TAGS
        work = self.begin(BackgroundWork(pass_on, self._group, sends, receives, self._tag))
        return Pending(lambda: self.wait(work))

    # --- single messages; Gloo only --------------------------------------------------------------

    def reserve_tags(self, count: int) -> int:
        """The first of so many tags of channels. Every member reserves as many, in the same
        order."""
        first = _TAGS + self._reserved
        self._reserved = (self._reserved + count) % (_TAGS // 2)
        return first

    def send(self, data: Tensor, to: int, tag: int) -> None:
        """Send to one member, and wait until it has it; not to be interrupted."""
        self._group.send([data], to, tag).wait()

    def receive(self, into: Tensor, source: int, tag: int) -> None:
        """Fill a tensor with what one member sends; not to be interrupted."""
        self._group.recv([into], source, tag).wait()

    def wait_for(self, work: BackgroundWork, member: int) -> None:
        """Wait for what one member owes, with an eye on it."""
        started, said = time.monotonic(), FIRST
        while not work.is_completed():
            try:
                work.wait(_GLANCE)
            except RuntimeError:
                if work.is_completed():
                    break
                waited = time.monotonic() - started
                self._watch(waited)
                if self._late is not None and waited >= self._late.seconds:
                    self._late.give_up(self._names[member], waited)
                if waited >= said:
                    said = waited + AGAIN
                    say_late(self._names[member], waited)
        work.wait()

    def abort(self) -> None:
        """Give the group up while a peer may still owe it something. (Gloo has no such thing.)"""
        if self._backend == "nccl":
            self._group.abort()


def _others(rank: int, table: Tensor) -> list[tuple[int, Tensor]]:
    """The other members and their rows; whoever comes next first, so that not all send to one."""
    size = len(table) if table.numel() else 1
    return [((rank + i) % size, table[(rank + i) % size]) for i in range(1, size)]


def _device(hostname: str) -> Any:
    """A port for a group; every member connects at once, so that it can be shut then."""
    return dist.ProcessGroupGloo.create_device(hostname=hostname, lazy_init=False)


def _published(store: Any, rank: int) -> bytes:
    """What Gloo has told the others of its port; nothing if it tells that in another place."""
    key = f"0/{rank}"  # of the first device
    return bytes(store.get(key)) if store.check([key]) else b""


#: groups whose owner is gone, with what had not ended then
_kept: list[tuple[Any, deque[Any]]] = []


def _let_go(group: Any, works: deque[Any], process: int) -> None:
    """Keep a group of Gloo that still waits for a peer, or is of the process that forked this one.

    Its destructor would wait, too, at the end of the process as well; so nothing may call it, not
    even the interpreter's own end, until the peer's end has ended the wait. After a fork, as by a
    DataLoader, there are no threads of the group to join, and joining them is a crash.
    """
    if os.getpid() != process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    elif not _ended(works):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _kept.append((group, works))


def _release() -> None:
    """Let go of the groups that wait for nobody any more; their sockets close."""
    for entry in [each for each in _kept if _ended(each[1])]:
        _kept.remove(entry)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(entry[0]))


def _ended(works: deque[Any]) -> bool:
    return all(work.is_completed() for work in works)


_Base: Any = dist.Store  # type: ignore[attr-defined]


class MeetingStore(_Base):  # type: ignore[misc]
    """A torch Store over a membership; `name` keeps it apart from others over the same one.

    It has what groups of Gloo and NCCL ask for at their start: set, get, wait and check. Every
    key has one writer. torch's own store listens for whoever connects, without a proof of
    anything; the membership's connections have proved the job's secret.
    """

    def __init__(self, membership: Membership, name: str, limit: timedelta) -> None:
        super().__init__()
        self._membership = membership
        self._name = name
        self._limit = limit

    def within(self, name: str) -> MeetingStore:
        """Another over the same membership, for some of the members."""
        return MeetingStore(self._membership, f"{self._name}/{name}", self._limit)

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value for all members."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._membership.publish(self._key(key), base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        return base64.b64decode(self._membership.board.read(self._key(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these have been written."""
        limit = (timeout or self._limit).total_seconds()
        found = [self._key(key) for key in keys]
        self._membership.board.wait(found, limit, lambda: self._membership.trouble)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these have been written."""
        return self._membership.board.has(self._key(key) for key in keys)
