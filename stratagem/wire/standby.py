"""The collective of a standby: it follows a log, then replaces a replica that has died.

                     step 41                     step 42
    replica 2   --- computes --- reduction --- computes, killed
    standby 2   --- skips it ----------------- waits .......... computes --- reduction ---
    others      --- compute ---- reduction --- compute ---- wait for replica 2 --- reduction ---

A step is taken over from its beginning, if the dead replica had not met the others in it. So the
other replicas repeat nothing: they wait for as long as the dead one had worked on the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.wire.collective import Pending
from stratagem.wire.collective_log import LogFollower
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective, SharedTable, Watch
from stratagem.wire.tree import decode


class StandbyCollective(SharedMemoryCollective):
    """Replays the log until an order comes; `sit_down` then returns the watch of the peers."""

    def __init__(
        self,
        rank: int,
        size: int,
        control: Segment,
        names: Sequence[str],
        reader: LogFollower,
        start: tuple[int, int],
        sit_down: Callable[[], Watch],
    ) -> None:
        super().__init__(rank, size, control, None, names)
        self.live = False
        self._reader, self._sit_down = reader, sit_down
        self._turn, self._mail.box = start
        self._adopt: Callable[[Any], None] | None = None

    def offer(self, state: Callable[[], Any] | None, adopt: Callable[[Any], None]) -> None:
        self._adopt = adopt

    def step(self, work: Callable[[], None]) -> bool:
        if not self.live and self._replay("step") is not None:
            return False
        if not self.live:
            self._take_over()
        work()
        return True

    def _take_over(self) -> None:
        order = self._reader.order
        assert order is not None and self._adopt is not None
        self._watch = self._sit_down()
        self._adopt(order.state)
        self.live = True

    def _replay(self, kind: str) -> Tensor | None:
        """Return the logged result of an operation; None if this replica must run the step."""
        while (entry := self._reader.next()) is None:
            order = self._reader.order
            if kind == "step" and order is not None and order.turn == self._turn:
                return None
            self._reader.wait(ready=kind == "step" and self._adopt is not None)
        if entry.kind != kind:
            raise RuntimeError(f"a standby has come to a {kind} where others had a {entry.kind}")
        self._turn, self._mail.box = entry.turn, entry.box
        return entry.data

    def _replayed(self, kind: str) -> Tensor:
        found = self._replay(kind)
        assert found is not None
        return found

    def barrier(self) -> None:
        if self.live:
            super().barrier()
        else:
            self._replay("barrier")

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        if self.live:
            return super().gather_bytes(data)
        found: list[Tensor] = decode(self._replayed("gather"))
        return found

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        if self.live:
            return super().broadcast_bytes(data, source)
        return self._replayed("broadcast")

    def table(self, count: int, dtype: torch.dtype, rows: int = 0) -> SharedTable:
        if self.live:
            return super().table(count, dtype, rows)
        handle = self._replayed("table").numpy().tobytes().decode()
        return SharedTable(Segment.attach(handle), rows or self.size, count, dtype)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        if not self.live:
            raise RuntimeError("a standby has come to a reduction outside of a step")
        return super().all_reduce(flat, weight)
