"""A torch process group with the operations that the cross-device algorithms need.

Groups are made directly, never through `init_process_group`: that one is global to the process
(so two strategies could not live side by side), replaces `sys.excepthook`, and makes newer Keras
wrap models in DDP. 16-bit tensors travel as they are and are summed in fp32.
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
from stratagem.wire.point_to_point import BackgroundWork, exchange, sum_half

#: between two checks of the membership while waiting, at first and later: only neighbours in a ring
#: notice a death by themselves, and no member notices one that joins
_SOON, _GLANCE = timedelta(milliseconds=4), timedelta(milliseconds=20)
_LONG = 0.2  # seconds
_TAGS = 1 << 30  # limit of message tags, which Gloo keeps in 32 bits


@dataclass(frozen=True)
class Meeting:
    """What a group needs to connect: a store, the address to listen on, and a time limit."""

    store: Any
    hostname: str
    limit: timedelta
    #: called with the seconds waited so far; raises when a member is in trouble
    watch: Callable[[float], None]
    #: every replica's name, by rank
    names: tuple[str, ...] = ()
    #: how long a member may be late; None: as long as `limit`
    late: Limit | None = None


class ProcessGroup:
    """A group of replicas, whose ranks in it are 0 .. size-1."""

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
        #: Gloo's operations that may still be under way
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
            # all members connect at once: `link_time` watches the connections made here
            device = dist.ProcessGroupGloo.create_device(hostname=meeting.hostname, lazy_init=False)
            options = gloo_options(meeting.limit, device)
            made = partial(dist.ProcessGroupGloo, store, rank, size, options)
            self._group = link_time.watched(made)
            _release()
            weakref.finalize(self, _let_go, self._group, self._works, os.getpid())

    def begin(self, work: Any) -> Any:
        """Register work that has begun, so that this group outlives it."""
        if self._backend == "gloo":
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.append(work)
        return work

    def wait(self, work: Any) -> None:
        """Wait for work of this group while watching its members.

        Gloo itself would wait for a stopped peer until its time limit, and its `abort` wakes no
        thread. (For NCCL this only makes the GPU's stream wait.)
        """
        self._turn += 1
        since = METER.begin_wait()
        try:
            self._wait(work, partial(self._lateness.waiting, self._turn))
        finally:
            METER.end_wait(since)

    def _wait(self, work: Any, late: Callable[[float], None]) -> None:
        started, glance = time.monotonic(), _SOON
        while self._backend == "gloo" and not work.is_completed():
            try:
                work.wait(glance)
            except RuntimeError:
                if work.is_completed():
                    break  # the wait below returns or raises its result
                waited = time.monotonic() - started
                glance = _SOON if waited < _LONG else _GLANCE
                self._watch(waited)
                late(waited)
        work.wait()

    def _do(self, work: Any) -> None:
        self.wait(self.begin(work))

    def sum(self, flat: Tensor) -> Pending:
        """All-reduce in place."""
        if self.size == 1:
            return Pending()
        METER.bytes += flat.nbytes
        # Gloo, too, adds in fp32, but rounds after each addition: right for two members only
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
        """Scatter the chunks, sum each in fp32 on one member, gather the rounded sums."""
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
        """Leave the sum in the root's tensor; other members' content is undefined."""
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
        """Overwrite every member's tensor with the root's."""
        if self.size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._do(self._group.broadcast([flat], options))

    def gather(self, flat: Tensor) -> list[Tensor]:
        """Gather every member's tensor, all of one size, in rank order."""
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        self._do(self._group.allgather([parts], [flat]))
        return parts

    def gather_into(self, whole: Tensor, part: Tensor) -> Pending:
        """Gather every member's flat part into `whole`, in rank order."""
        METER.bytes += part.nbytes
        table, row = whole.view(self.size, -1), part.reshape(-1)
        if self._backend != "gloo" or row.device.type != "cpu":
            work = self.begin(self._group.allgather([list(table.unbind(0))], [row]))
            return Pending(lambda: self.wait(work))
        peers = _peer_rows(self.rank, table)
        pending = self._exchange([(rank, row) for rank, _ in peers], peers)
        table[self.rank].copy_(row)
        return pending

    def sum_into(self, part: Tensor, whole: Tensor) -> Pending:
        """Reduce-scatter: sum this member's part over the group, in rank order."""
        rows = whole.view(self.size, -1)
        received = torch.empty_like(rows)
        pending = self.swap_into(received, rows)

        def finish() -> None:
            pending.wait()
            part.view(-1).copy_(add_up(received))

        return Pending(finish)

    def swap_into(self, received: Tensor, rows: Tensor) -> Pending:
        """All-to-all: send row r of a table to member r, and receive a row from each."""
        METER.bytes += rows.nbytes
        if self._backend != "gloo" or rows.device.type != "cpu":
            options = dist.AllToAllOptions()
            work = self.begin(self._group.alltoall_base(received, rows, [], [], options))
            return Pending(lambda: self.wait(work))
        pending = self._exchange(_peer_rows(self.rank, rows), _peer_rows(self.rank, received))
        received[self.rank].copy_(rows[self.rank])
        return pending

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        """Send to the receivers, and return what the senders sent; Gloo only."""
        METER.bytes += flat.nbytes * len(receivers)
        found = [torch.empty_like(flat) for _ in senders]
        sends = [(rank, flat) for rank in receivers]
        self._exchange(sends, list(zip(senders, found, strict=True))).wait()
        return found

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Pending:
        self._tag = (self._tag + 2) % _TAGS
        work = self.begin(BackgroundWork(exchange, self._group, sends, receives, self._tag))
        return Pending(lambda: self.wait(work))

    # --- single messages; Gloo only --------------------------------------------------------------

    def reserve_tags(self, count: int) -> int:
        """Reserve `count` message tags and return the first; members reserve in the same order."""
        first = _TAGS + self._reserved
        self._reserved = (self._reserved + count) % (_TAGS // 2)
        return first

    def send(self, data: Tensor, to: int, tag: int) -> None:
        """Send to one member and wait until it has received; cannot be interrupted."""
        self._group.send([data], to, tag).wait()

    def receive(self, into: Tensor, source: int, tag: int) -> None:
        """Receive a tensor from one member; cannot be interrupted."""
        self._group.recv([into], source, tag).wait()

    def wait_for(self, work: BackgroundWork, member: int) -> None:
        """Wait for work that needs one member, while watching it."""
        said = FIRST

        def late(waited: float) -> None:
            nonlocal said
            if self._late is not None and waited >= self._late.seconds:
                self._late.give_up(self._names[member], waited)
            if waited >= said:
                said = waited + AGAIN
                say_late(self._names[member], waited)

        self._wait(work, late)

    def abort(self) -> None:
        """Abort what is under way; Gloo cannot."""
        if self._backend == "nccl":
            self._group.abort()


def _peer_rows(rank: int, table: Tensor) -> list[tuple[int, Tensor]]:
    """Return the other members and their rows, from the next rank on: not all send to one."""
    size = len(table) if table.numel() else 1
    return [((rank + i) % size, table[(rank + i) % size]) for i in range(1, size)]


#: groups whose owner is gone, with their unfinished operations
_kept: list[tuple[Any, deque[Any]]] = []


def _let_go(group: Any, works: deque[Any], process: int) -> None:
    """Leak a Gloo group that still waits for a peer, or that a parent process made.

    Its destructor would wait for the peer, too, even at interpreter exit; so it must not run until
    the peer's end has ended the wait. After a fork, as by a DataLoader, the group's threads do not
    exist, and joining them crashes.
    """
    if os.getpid() != process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    elif not _ended(works):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _kept.append((group, works))


def _release() -> None:
    """Free the leaked groups whose operations have ended; their sockets close."""
    for entry in [each for each in _kept if _ended(each[1])]:
        _kept.remove(entry)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(entry[0]))


def _ended(works: deque[Any]) -> bool:
    return all(work.is_completed() for work in works)


_Base: Any = dist.Store  # type: ignore[attr-defined]


class MeetingStore(_Base):  # type: ignore[misc]
    """A torch Store over a membership; `name` is a prefix of its keys.

    It has what Gloo and NCCL groups use at their start: set, get, wait and check. Every key has one
    writer. torch's own store accepts any connection; the membership's connections have proved the
    job's secret.
    """

    def __init__(self, membership: Membership, name: str, limit: timedelta) -> None:
        super().__init__()
        self._membership = membership
        self._name = name
        self._limit = limit

    def within(self, name: str) -> MeetingStore:
        """Return a store over the same membership for some of its members."""
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
        """Wait until all keys have been written."""
        limit = (timeout or self._limit).total_seconds()
        found = [self._key(key) for key in keys]
        self._membership.board.wait(found, limit, lambda: self._membership.trouble)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have been written."""
        return self._membership.board.has(self._key(key) for key in keys)
