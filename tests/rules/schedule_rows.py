"""Pipeline schedules played with operations of equal length, and drawn as text."""

from __future__ import annotations

from typing import Literal

from stratagem.rules.schedules import Op, Schedule


def run(
    schedule: Schedule, devices: int, microbatches: int, parts: int = 1, slots: int | None = None
) -> list[list[Op | None]]:
    """Each device's work in steps of one operation, None where it waits.

    Neighbouring parts hand over through channels of so many slots, without a limit if None; a
    device that finds none free waits. Raises RuntimeError where nobody can go on.
    """
    queues = [list(schedule(d, devices, microbatches, parts)) for d in range(devices)]
    rows: list[list[Op | None]] = [[] for _ in range(devices)]
    done: set[Op] = set()
    last = devices * parts - 1

    def sent(kind: Literal["F", "B"], part: int) -> int:
        return sum(op.kind == kind and op.part == part for op in done)

    def ready(op: Op) -> bool:
        kind, part, m = op
        before = (part > 0) if kind == "F" else (part < last)
        if before and Op(kind, part - 1 if kind == "F" else part + 1, m) not in done:
            return False
        if kind == "B" and Op("F", part, m) not in done:
            return False
        behind = (part < last) if kind == "F" else (part > 0)
        if slots is None or not behind:
            return True
        to = part + 1 if kind == "F" else part - 1
        return sent(kind, part) - sent(kind, to) < slots

    while any(queues):
        now = [queue[0] if queue and ready(queue[0]) else None for queue in queues]
        if not any(now):
            raise RuntimeError(f"nobody can go on: {[queue[:1] for queue in queues]}")
        for device, op in enumerate(now):
            rows[device].append(op)
            if op is not None:
                queues[device].pop(0)
                done.add(op)
    return rows


def draw(schedule: Schedule, devices: int, microbatches: int, parts: int = 1) -> str:
    """Draw a schedule as text, one line per device; with several parts operations name theirs."""
    rows = run(schedule, devices, microbatches, parts)
    cells = [[_cell(op, parts) for op in row] for row in rows]
    width = max(len(cell) for row in cells for cell in row)
    lines = [" ".join(cell or "." * width for cell in row) for row in cells]
    return "\n".join(f"device {i}  {line}" for i, line in enumerate(lines))


def _cell(op: Op | None, parts: int) -> str:
    if op is None:
        return ""
    return f"{op.kind}{op.microbatch}" + (f"/{op.part}" if parts > 1 else "")
