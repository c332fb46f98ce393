"""Collectives of CPU replicas on one machine, through shared memory.

All-reduce in place with two barriers and no copy: every replica's buffer is a row of one shared
table; replica r alone reads column slice r of all rows, sums them, and writes the sum back into
slice r of all rows.

            slice 0   slice 1   slice 2
    row 0 [ r0 adds | r1 adds | r2 adds ]     barrier, add and write back, barrier
    row 1 [ this    | this    | this    ]
    row 2 [ column  | column  | column  ]

Each element is summed once, by one replica, so all replicas hold the same bits.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stratagem.errors import ReplicaError, UsageError
from stratagem.figures.meter import METER
from stratagem.wire.collective import HALF, Collective, Pending
from stratagem.wire.collective_log import TURN, LoggedCollective
from stratagem.wire.mailboxes import WORDS, Mailboxes
from stratagem.wire.segment import Segment, aligned
from stratagem.wire.tree import encode

#: the kinds of meetings; each arrival carries the index of its kind
_MEETINGS = ("barrier", "reduction", "gather", "broadcast", "table", "gradient", "update")
_SPIN, _DOZE = 200e-6, 20e-6  # seconds
_LONGEST, _LOOK = 1e-3, 5e-3  # seconds: the longest sleep, and between two checks of a peer
Watch = Callable[[int, float], None]
_TOTAL_STORE_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


class SharedTable:
    """One row of `count` elements per replica, all rows visible to all."""

    def __init__(self, segment: Segment, rows: int, count: int, dtype: torch.dtype) -> None:
        stride = aligned(count * dtype.itemsize)
        self.segment = segment
        self.count = count
        self.rows = [segment.tensor(dtype, (count,), offset=r * stride) for r in range(rows)]
        #: the rows as one two-dimensional tensor
        width = stride // dtype.itemsize
        self.grid = segment.tensor(dtype, (rows, width))[:, :count]
        #: the slice of every row that this replica sums, once cut
        self.parts: list[Tensor] | None = None

    def words(self) -> list[memoryview]:
        """Return the rows as memoryviews for Python; for 64-bit integers."""
        row = SharedTable.size(1, self.count, torch.int64)
        return [self.segment.words(self.count, r * row) for r in range(len(self.rows))]

    def parts_at(self, start: int, size: int) -> list[Tensor]:
        """Return the same slice of every row."""
        return [row[start : start + size] for row in self.rows]

    @staticmethod
    def size(rows: int, count: int, dtype: torch.dtype) -> int:
        return rows * aligned(count * dtype.itemsize)


def slices(count: int, parts: int) -> list[tuple[int, int]]:
    """Return contiguous, nearly equal, cache-line aligned slices of `count` elements."""
    step = -(-count // parts)
    step = -(-step // 16) * 16
    return [(min(i * step, count), min((i + 1) * step, count)) for i in range(parts)]


class SharedMemoryCollective(LoggedCollective):
    """The collective of CPU replicas of one machine; `names` are by rank.

    `watch(rank, seconds)` is called while waiting for a replica, and may raise.
    """

    overlaps = False  # summing would take cores from computing
    shares_memory = True

    def __init__(
        self,
        rank: int,
        size: int,
        control: Segment,
        watch: Watch | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.rank, self.size = rank, size
        self.names = names or [f"replica {r}" for r in range(size)]
        self._control = control
        self._flags = control.words(size * WORDS)
        self._mail = Mailboxes(rank, size, control, self._flags)
        weights = size * WORDS * 8 + Mailboxes.size_for(size)
        self._weights = control.tensor(torch.float64, (size,), weights).numpy()
        self._watch = watch or (lambda rank, seconds: None)
        self._turn = 0
        self._tables: dict[int, SharedTable] = {}
        self._fence = threading.Lock()
        self._yield_first = size <= (os.cpu_count() or 1)

    @staticmethod
    def control_size(size: int) -> int:
        return size * WORDS * 8 + Mailboxes.size_for(size) + aligned(size * 8)

    def barrier(self) -> None:
        self.meet("barrier")
        self._note("barrier")

    def meet(self, what: str) -> None:
        """Wait for all replicas, and check that all are at the same operation."""
        self._turn += TURN
        turn, flags = self._turn, self._flags
        mark = turn + _MEETINGS.index(what)
        self.order_writes()
        flags[self.rank * WORDS] = mark
        for other in range(self.size):
            if flags[other * WORDS] < turn:
                self._await(other, turn)
            found = flags[other * WORDS]
            if found != mark and found < turn + TURN:  # or in a later meeting
                raise UsageError(
                    f"{self.names[self.rank]} is at a {what} where {self.names[other]} is at a "
                    f"{_MEETINGS[found - turn]}: they run different code, or loops with another "
                    "number of steps or number of epochs. Every replica must do the same."
                )
        self.order_writes()

    def _await(self, rank: int, turn: int) -> None:
        flags, slot = self._flags, rank * WORDS
        self.wait_for(rank, lambda: flags[slot] >= turn)

    def wait_for(self, rank: int, ready: Callable[[], bool], limit: float = math.inf) -> bool:
        """Wait until `ready`, which depends on a replica; False after `limit` seconds.

        Spins briefly, then sleeps, for longer and longer: spinning would slow down other processes
        on the core, and the replica that is waited for may be one of them."""
        for _ in range(64):
            if ready():
                return True
        started = METER.begin_wait()
        doze_after = _SPIN if self._yield_first else 0.0
        look_after = _LOOK
        try:
            while not ready():
                waited = time.perf_counter() - started
                if waited > limit:
                    return False
                if waited < doze_after:
                    os.sched_yield()
                else:
                    time.sleep(min(max(_DOZE, waited / 64), _LONGEST))
                if waited >= look_after:
                    look_after = waited + _LOOK
                    self._check(rank, ready, waited)
            return True
        finally:
            METER.end_wait(started)

    def _check(self, rank: int, ready: Callable[[], bool], waited: float) -> None:
        """Raise if the peer is gone, unless it arrived before it left."""
        try:
            self._watch(rank, waited)
        except ReplicaError:
            if not ready():
                raise

    def look(self, rank: int, waited: float) -> None:
        """Raise if a replica that is being waited for is gone."""
        self._watch(rank, waited)

    def order_writes(self) -> None:
        """Order writes of tensors before writes of flags; x86 does so by itself."""
        if not _TOTAL_STORE_ORDER:
            with self._fence:
                pass
            with self._fence:
                pass

    # --- flat reductions -------------------------------------------------------------------

    def table(self, count: int, dtype: torch.dtype, rows: int = 0) -> SharedTable:
        """Create a shared table of `rows` rows, by default one a replica. Collective."""
        rows = rows or self.size
        size = SharedTable.size(rows, count, dtype)
        segment = Segment(size) if self.rank == 0 else None
        box = self._mail.next_box()
        if segment is not None:
            self._mail.write_handle(segment.handle, box)
        self.meet("table")
        if segment is None:
            segment = Segment.attach(self._mail.read_handle(0, box))
        self.meet("table")
        if self.log is not None and self.log.writes:
            self.log.tables.append(segment)
            handle = bytearray(segment.handle.encode())
            self._note("table", lambda: torch.frombuffer(handle, dtype=torch.uint8))
        return SharedTable(segment, rows, count, dtype)

    def table_of(self, row: Tensor) -> SharedTable:
        """Return the table that a `buffer` is a row of."""
        return self._tables[row.data_ptr()]

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        table = self.table(count, dtype)
        row = table.rows[self.rank]
        self._tables[row.data_ptr()] = table
        return row

    def release(self, flat: Tensor) -> None:
        self._tables.pop(flat.data_ptr(), None)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        if self.log is not None and self.log.writes:
            self.log.give_up()  # a reduction outside of a step is not logged
        table = self._tables.get(flat.data_ptr())
        if table is not None and table.count == flat.numel():
            self._reduce(table, weight)
            return Pending()
        work = self.buffer(flat.numel(), flat.dtype, flat.device)
        work.copy_(flat.reshape(-1))
        self._reduce(self._tables.pop(work.data_ptr()), weight)
        flat.copy_(work.view(flat.shape))
        return Pending()

    def _reduce(self, table: SharedTable, weight: float) -> None:
        self._weights[self.rank] = weight
        METER.bytes += table.rows[0].nbytes
        self.meet("reduction")
        parts = table.parts
        if parts is None:
            start, end = slices(table.count, self.size)[self.rank]
            parts = table.parts = table.parts_at(start, end - start)
        if size := len(parts[0]):
            wide = torch.float32 if parts[0].dtype in HALF else parts[0].dtype
            total = torch.empty(size, dtype=wide)
            sum_parts(parts, self._weights.tolist(), total)
            for part in parts:
                part.copy_(total)
        self.meet("reduction")

    # --- messages ---------------------------------------------------------------------------

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        box = self._mail.next_box()
        self._mail.post(data, box)
        self.meet("gather")
        found = [self._mail.fetch(rank, box) for rank in range(self.size)]
        self._note("gather", lambda: encode(found))
        return found

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        box = self._mail.next_box()
        if data is not None and self.rank == source:
            self._mail.post(data, box)
        self.meet("broadcast")
        found = data if data is not None and self.rank == source else self._mail.fetch(source, box)
        self._note("broadcast", lambda: found)
        return found

    def forget_mail(self) -> None:
        """Free the memory of large messages. Collective."""
        self.barrier()
        self._mail.forget()
        self.barrier()

    def close(self) -> None:
        self._tables.clear()


def sharing(collective: Collective) -> SharedMemoryCollective:
    """Cast a collective whose replicas share memory, which the caller has checked."""
    assert isinstance(collective, SharedMemoryCollective), "these replicas share no memory"
    return collective


def sum_rows(table: SharedTable, start: int, weights: list[float], total: Tensor) -> None:
    """Write the weighted sum of the column slice from `start` into `total`.

    A row with weight zero is skipped. `total` is at least fp32, and no other memory is allocated:
    page faults of new memory in every step would cost more than the sum itself.
    """
    sum_parts(table.parts_at(start, len(total)), weights, total)


def sum_parts(parts: Sequence[Tensor], weights: Sequence[float], total: Tensor) -> None:
    """Write the weighted sum of slices into `total`."""
    used = [(part, w) for part, w in zip(parts, weights, strict=True) if w != 0.0]
    same = {w for _, w in used}
    if len(used) > 1 and len(same) == 1 and total.dtype is parts[0].dtype:
        torch.add(used[0][0], used[1][0], out=total)
        for row, _ in used[2:]:
            total.add_(row)
        scale = same.pop()
        if scale != 1.0:
            total.mul_(scale)
        return
    total.zero_()
    for row, weight in used:
        total.add_(row, alpha=weight)
