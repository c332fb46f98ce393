"""When each operation of a schedule begins and ends, given how long operations and hand-overs take.

A device does its operations in the order of its schedule (rules/schedules.py), each as soon as what
it needs is there. What a part hands on goes over the link from its device to the other one: one
message after another, in the order in which they are made. Pure: seconds are numbers, nothing runs.

With 2 devices, a backward twice as long as a forward, and nothing to hand over:

    device 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
    device 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from stratagem.rules.schedules import Op, Schedule


@dataclass(frozen=True)
class Span:
    """One operation of a device, from when to when."""

    device: int
    op: Op
    begin: float
    end: float


@dataclass(frozen=True)
class HandOver:
    """How long what an operation makes is on its way to the device that needs it next.

    `busy` seconds it keeps the link, on which the next message waits; then `late` seconds of
    latency, in which others may follow.
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
        """Seconds that each device works."""
        found = [0.0] * self.devices
        for span in self.spans:
            found[span.device] += span.end - span.begin
        return tuple(found)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """When each device has done its last operation."""
        found = [0.0] * self.devices
        for span in self.spans:
            found[span.device] = max(found[span.device], span.end)
        return tuple(found)

    @property
    def bubble(self) -> float:
        """The share of the time of all devices in which they wait."""
        whole = self.devices * self.seconds
        return 1 - sum(self.busy) / whole if whole else 0.0


def timeline(
    schedule: Schedule,
    devices: int,
    microbatches: int,
    parts: int,
    seconds: Callable[[Op], float],
    hand_over: Callable[[Op], HandOver] = lambda op: HandOver(),
) -> Timeline:
    """Have every operation begin as early as it can.

    `seconds` is what an operation takes, `hand_over` what its result takes to the next device; a
    device hands nothing over to itself. Raises RuntimeError where nobody can go on.
    """
    queues = [list(schedule(d, devices, microbatches, parts))[::-1] for d in range(devices)]
    last = devices * parts - 1
    free = [0.0] * devices
    links: dict[tuple[int, int], float] = {}
    #: when what an operation needs is on its device
    there: dict[Op, float] = {}
    spans: list[Span] = []
    while any(queues):
        before = len(spans)
        for device, queue in enumerate(queues):
            while queue and (queue[-1] in there or queue[-1][:2] == ("F", 0)):
                op = queue.pop()
                begin = max(there.get(op, 0.0), free[device])
                end = free[device] = begin + seconds(op)
                spans.append(Span(device, op, begin, end))
                after = next_op(op, last)
                if after is not None:
                    way = (device, after.part % devices)
                    there[after] = arrival(links, way, end, hand_over(op))
        if len(spans) == before:
            raise RuntimeError(f"nobody can go on: {[queue[-1:] for queue in queues]}")
    return Timeline(devices, tuple(sorted(spans, key=lambda span: (span.begin, span.device))))


def next_op(op: Op, last: int) -> Op | None:
    """What an operation's result is for; the last part turns round, and the first ends it."""
    kind, part, m = op
    if kind == "F":
        return Op("F", part + 1, m) if part < last else Op("B", part, m)
    return Op("B", part - 1, m) if part else None


def arrival(
    links: dict[tuple[int, int], float], way: tuple[int, int], made: float, takes: HandOver
) -> float:
    """When a message is there; `links`: until when each way is taken."""
    if way[0] == way[1]:
        return made
    links[way] = max(made, links.get(way, 0.0)) + takes.busy
    return links[way] + takes.late


def draw(line: Timeline, width: int = 72) -> str:
    """The time line as text, a line a device: as many columns as there is time for."""
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
