"""When each operation of a schedule begins and ends, given how long operations and messages take.

A device does its operations in the order of its schedule (rules/schedules.py), each as soon as its
input is there. Results go over the link between two devices, one message after another, in the
order in which they are made. Pure: seconds are numbers, nothing runs.

With 2 devices, a backward twice as long as a forward, and nothing to hand over:

    device 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
    device 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..

Where everything takes twice as long while both devices compute:

    device 0  F0 F1 F1 B0 B0 ...
    device 1  .. F0 F0 ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from stratagem.rules.schedules import Op, Schedule


@dataclass(frozen=True)
class Span:
    """One operation on its device, with its begin and end in seconds."""

    device: int
    op: Op
    begin: float
    end: float


@dataclass(frozen=True)
class HandOver:
    """How long the result of an operation travels to the next device.

    The link is taken for `busy` seconds, in which the next message waits; then come `late` seconds
    of latency, in which other messages may follow.
    """

    busy: float = 0.0
    late: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """One batch through all devices."""

    devices: int
    spans: tuple[Span, ...]

    @cached_property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each device computes."""
        found = [0.0] * self.devices
        for span in self.spans:
            found[span.device] += span.end - span.begin
        return tuple(found)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """When each device ends its last operation."""
        found = [0.0] * self.devices
        for span in self.spans:
            found[span.device] = max(found[span.device], span.end)
        return tuple(found)

    @property
    def bubble(self) -> float:
        """The share of the devices' time that they wait."""
        whole = self.devices * self.seconds
        return 1 - sum(self.busy) / whole if whole else 0.0


def timeline(
    schedule: Schedule,
    devices: int,
    microbatches: int,
    parts: int,
    seconds: Callable[[Op, int], float],
    hand_over: Callable[[Op], HandOver] = lambda op: HandOver(),
) -> Timeline:
    """Begin every operation as early as possible.

    `seconds(op, k)` is what an operation takes while k devices compute, its own included: processes
    of one machine share caches, memory and perhaps processors. Whenever k changes, what is left of
    the running operations goes on at the new speed. `hand_over` is what a result takes to the next
    device; a device hands nothing over to itself. Raises RuntimeError where no device can go on.
    """
    queues = [list(schedule(d, devices, microbatches, parts))[::-1] for d in range(devices)]
    last = devices * parts - 1
    links: dict[tuple[int, int], float] = {}
    #: when the input of an operation is on its device
    inputs = {Op("F", 0, m): 0.0 for m in range(microbatches)}
    running: dict[int, tuple[Op, float, float]] = {}  # operation, begin, seconds at this speed
    ends: dict[int, float] = {}  # of the running operations, if k stays as it is
    spans: list[Span] = []
    now, computing = 0.0, 0
    #: devices that compute nothing, and when they can go on
    ready = {d: inputs.get(queue[-1], math.inf) for d, queue in enumerate(queues) if queue}
    while running or ready:
        began = [device for device, at in ready.items() if at <= now]
        if len(running) + len(began) != computing:
            computing = len(running) + len(began)
            for device, (op, begin, before) in running.items():
                after = seconds(op, computing)
                if after != before:
                    ends[device] = now + (ends[device] - now) * after / before
                    running[device] = op, begin, after
        for device in began:
            del ready[device]
            op = queues[device].pop()
            running[device] = op, now, seconds(op, computing)
            ends[device] = now + running[device][2]
        now = min(min(ends.values(), default=math.inf), min(ready.values(), default=math.inf))
        if now == math.inf:
            raise RuntimeError(f"nobody can go on: {[queue[-1:] for queue in queues]}")
        for device in [d for d, end in ends.items() if end <= now]:
            op, begin, _ = running.pop(device)
            spans.append(Span(device, op, begin, ends.pop(device)))
            if queues[device]:
                ready[device] = inputs.get(queues[device][-1], math.inf)
            following = _following(op, last)
            if following is not None:
                to = following.part % devices
                inputs[following] = _arrival(links, (device, to), now, hand_over(op))
                if to in ready and queues[to][-1] == following:
                    ready[to] = inputs[following]
    return Timeline(devices, tuple(sorted(spans, key=lambda span: (span.begin, span.device))))


def _following(op: Op, last: int) -> Op | None:
    """The operation that needs the result of `op`; None after the backward of the first part."""
    kind, part, m = op
    if kind == "F":
        return Op("F", part + 1, m) if part < last else Op("B", part, m)
    return Op("B", part - 1, m) if part else None


def _arrival(
    links: dict[tuple[int, int], float], way: tuple[int, int], made: float, takes: HandOver
) -> float:
    """When a message arrives; `links`: until when each link is busy."""
    if way[0] == way[1]:
        return made
    links[way] = max(made, links.get(way, 0.0)) + takes.busy
    return links[way] + takes.late


def draw(line: Timeline, width: int = 72) -> str:
    """The time line as text, one line per device, `width` columns."""
    column = line.seconds / width if line.seconds else 1.0
    rows = []
    for device in range(line.devices):
        cells = ["."] * width
        for span in (span for span in line.spans if span.device == device):
            first, end = round(span.begin / column), max(round(span.end / column), 1)
            name = f"{span.op.kind}{span.op.microbatch}"
            shown = (name + ("-" if span.op.kind == "F" else "=") * width)[: end - first]
            cells[first:end] = shown
        rows.append("".join(cells[:width]))
    return "\n".join(f"device {i}  {row}" for i, row in enumerate(rows))
