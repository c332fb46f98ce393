"""The time line of a schedule whose devices keep each other up: processes of one machine.

As in rules/timeline.py, but what an operation takes depends on how many devices compute at the
moment: they share caches and memory, and where there are fewer processors than devices, those, too.
Whenever one begins or ends, what is left of the others goes on at another speed. A device that
waits keeps nobody up.

Two devices, where everything takes twice as long while both compute:

    device 0  F0 F1 F1 B0 B0 ...
    device 1  .. F0 F0 ...
"""

from __future__ import annotations

import math
from collections.abc import Callable

from stratagem.rules.schedules import Op, Schedule
from stratagem.rules.timeline import HandOver, Span, Timeline, arrival, next_op


def crowded_timeline(
    schedule: Schedule,
    devices: int,
    microbatches: int,
    parts: int,
    seconds: Callable[[Op, int], float],
    hand_over: Callable[[Op], HandOver] = lambda op: HandOver(),
) -> Timeline:
    """`seconds` is what an operation takes while so many devices compute, its own included."""
    queues = [list(schedule(d, devices, microbatches, parts))[::-1] for d in range(devices)]
    last = devices * parts - 1
    links: dict[tuple[int, int], float] = {}
    #: when what an operation needs is on its device
    there = {Op("F", 0, m): 0.0 for m in range(microbatches)}
    running: dict[int, tuple[Op, float, float]] = {}  # when it began, what it would take now
    ends: dict[int, float] = {}  # if nobody else begins or ends
    spans: list[Span] = []
    now, many = 0.0, 0
    #: devices that compute nothing, and when they can go on
    ready = {d: there.get(queue[-1], math.inf) for d, queue in enumerate(queues) if queue}
    while running or ready:
        began = [device for device, at in ready.items() if at <= now]
        if len(running) + len(began) != many:
            many = len(running) + len(began)
            for device, (op, begin, takes) in running.items():
                slower = seconds(op, many)
                ends[device] = now + (ends[device] - now) * slower / takes
                running[device] = op, begin, slower
        for device in began:
            del ready[device]
            op = queues[device].pop()
            running[device] = op, now, seconds(op, many)
            ends[device] = now + running[device][2]
        now = min(min(ends.values(), default=math.inf), min(ready.values(), default=math.inf))
        if now == math.inf:
            raise RuntimeError(f"nobody can go on: {[queue[-1:] for queue in queues]}")
        for device in [d for d, end in ends.items() if end <= now]:
            op, begin, _ = running.pop(device)
            spans.append(Span(device, op, begin, ends.pop(device)))
            if queues[device]:
                ready[device] = there.get(queues[device][-1], math.inf)
            after = next_op(op, last)
            if after is not None:
                to = after.part % devices
                there[after] = arrival(links, (device, to), now, hand_over(op))
                if to in ready and queues[to][-1] == after:
                    ready[to] = there[after]
    return Timeline(devices, tuple(sorted(spans, key=lambda span: (span.begin, span.device))))
