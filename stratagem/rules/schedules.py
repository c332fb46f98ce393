"""In which order the devices of a pipeline work on microbatches. Pure: nothing is run here.

A schedule is a generator of one device's operations. A model is cut into parts; part p lies on
device p modulo the number of devices. Every microbatch goes forward through all parts and then
backward through them in reverse. With 3 devices and 4 microbatches (`draw` makes these):

GPipe: all forward, then all backward; a device keeps what every microbatch needs for its backward.

    device 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    device 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    device 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

1F1B: backward as soon as it can be; device s keeps at most min(M, S - s) microbatches.

    device 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    device 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    device 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Eager: 1F1B that runs further ahead, so that a device which is late for once, or a message, makes
nobody wait; device s keeps at most min(M, 2 (S - s) - 1) microbatches.

    device 0  F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
    device 1  .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
    device 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Interleaved: every device has several parts, so that a microbatch comes to it sooner, and the idle
time is divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple


class Op(NamedTuple):
    """One microbatch through one part, forward ("F") or backward ("B")."""

    kind: Literal["F", "B"]
    part: int
    microbatch: int


def gpipe(device: int, devices: int, microbatches: int, parts: int = 1) -> Iterator[Op]:
    """All forward, then all backward."""
    yield from (Op("F", device, m) for m in range(microbatches))
    yield from (Op("B", device, m) for m in range(microbatches))


def one_f_one_b(device: int, devices: int, microbatches: int, parts: int = 1) -> Iterator[Op]:
    """One forward, one backward, after as many forward as there are devices behind this one."""
    yield from _alternating(device, microbatches, devices - device - 1)


def eager(device: int, devices: int, microbatches: int, parts: int = 1) -> Iterator[Op]:
    """The same after twice as many forward: as long as a microbatch is away, there is another."""
    yield from _alternating(device, microbatches, 2 * (devices - device - 1))


def _alternating(device: int, microbatches: int, ahead: int) -> Iterator[Op]:
    ahead = min(microbatches, ahead)
    yield from (Op("F", device, m) for m in range(ahead))
    for m in range(ahead, microbatches):
        yield Op("F", device, m)
        yield Op("B", device, m - ahead)
    yield from (Op("B", device, m) for m in range(microbatches - ahead, microbatches))


def interleaved(device: int, devices: int, microbatches: int, parts: int = 2) -> Iterator[Op]:
    """1F1B over several parts a device: microbatches go through them in groups of one a device.

    A last group that is not full is planned as a full one, without those that are missing.
    """
    own = range(device, devices * parts, devices)
    forward = list(_in_groups(own, devices, microbatches))
    backward = list(_in_groups(own[::-1], devices, microbatches))
    ahead = min(len(forward), (devices - device - 1) * 2 + (parts - 1) * devices)
    planned = [Op("F", *each) for each in forward[:ahead]]
    for one, other in zip(forward[ahead:], backward, strict=False):
        planned += [Op("F", *one), Op("B", *other)]
    planned += [Op("B", *each) for each in backward[len(forward) - ahead :]]
    yield from (op for op in planned if op.microbatch < microbatches)


def _in_groups(order: range, devices: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Parts in this order for the first few microbatches, then for the next few."""
    for first in range(0, microbatches, devices):
        for part in order:
            yield from ((part, m) for m in range(first, first + devices))


def waves(device: int, devices: int, chunks: int, parts: int = 1) -> Iterator[Op]:
    """For chunks of time, each of which begins where the one before it ended: forward from the
    first to the last, backward from the last to the first."""
    yield from (Op("F", device, m) for m in range(chunks))
    yield from (Op("B", device, m) for m in reversed(range(chunks)))


Schedule = Callable[[int, int, int, int], Iterator[Op]]
SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager": eager,
    "interleaved": interleaved,
}


def kept(ops: Iterator[Op]) -> int:
    """How many microbatches a device keeps at most between their forward and their backward."""
    now = most = 0
    for op in ops:
        now += 1 if op.kind == "F" else -1
        most = max(most, now)
    return most


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
    """A schedule as text, a line a device; with several parts each operation names its part."""
    rows = run(schedule, devices, microbatches, parts)
    cells = [[_cell(op, parts) for op in row] for row in rows]
    width = max(len(cell) for row in cells for cell in row)
    lines = [" ".join(cell or "." * width for cell in row) for row in cells]
    return "\n".join(f"device {i}  {line}" for i, line in enumerate(lines))


def _cell(op: Op | None, parts: int) -> str:
    if op is None:
        return ""
    return f"{op.kind}{op.microbatch}" + (f"/{op.part}" if parts > 1 else "")


def bubble(devices: int, microbatches: int, parts: int = 1) -> float:
    """The share of the time in which a device waits: (S - 1) / (v M + S - 1)."""
    return (devices - 1) / (parts * microbatches + devices - 1)
