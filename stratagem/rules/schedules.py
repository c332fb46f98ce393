"""Pipeline schedules: the order in which devices work on microbatches. Pure: nothing runs here.

A schedule is a generator of one device's operations. A model is cut into parts; part p lies on
device p modulo the number of devices. Every microbatch goes forward through all parts and then
backward through them in reverse. With 3 devices and 4 microbatches (`draw` makes these):

GPipe: all forward, then all backward; a device keeps what every microbatch needs for its backward.

    device 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    device 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    device 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

1F1B: backward as early as possible; device s keeps at most min(M, S - s) microbatches.

    device 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    device 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    device 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Eager: 1F1B that runs further ahead, so that a late device or message makes no device wait; device
s keeps at most min(M, 2 (S - s) - 1) microbatches.

    device 0  F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
    device 1  .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
    device 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Interleaved: every device has several parts, so a microbatch reaches it sooner; the idle time is
divided by their number.
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
    """One forward, one backward, after as many forwards as devices follow this one."""
    yield from _alternating(device, microbatches, devices - device - 1)


def eager(device: int, devices: int, microbatches: int, parts: int = 1) -> Iterator[Op]:
    """As 1F1B after twice as many forwards: a device has another microbatch while one is away."""
    yield from _alternating(device, microbatches, 2 * (devices - device - 1))


def _alternating(device: int, microbatches: int, ahead: int) -> Iterator[Op]:
    ahead = min(microbatches, ahead)
    yield from (Op("F", device, m) for m in range(ahead))
    for m in range(ahead, microbatches):
        yield Op("F", device, m)
        yield Op("B", device, m - ahead)
    yield from (Op("B", device, m) for m in range(microbatches - ahead, microbatches))


def interleaved(device: int, devices: int, microbatches: int, parts: int = 2) -> Iterator[Op]:
    """1F1B over several parts per device: microbatches go through them in groups of one per device.

    A last, smaller group is planned as a full one; the missing microbatches are left out.
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
    """Yield the parts in this order for each group of microbatches."""
    for first in range(0, microbatches, devices):
        for part in order:
            yield from ((part, m) for m in range(first, first + devices))


def waves(device: int, devices: int, chunks: int, parts: int = 1) -> Iterator[Op]:
    """Chunks of time, each beginning where the one before ended: backward is in reverse order."""
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
    """Return how many microbatches a device keeps at most between forward and backward."""
    now = most = 0
    for op in ops:
        now += 1 if op.kind == "F" else -1
        most = max(most, now)
    return most


def bubble(devices: int, microbatches: int, parts: int = 1) -> float:
    """Return the share of the time that a device waits: (S - 1) / (v M + S - 1)."""
    return (devices - 1) / (parts * microbatches + devices - 1)
