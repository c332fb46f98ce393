"""Simulate a pipeline in virtual time: the real schedule, with given computation and links.

Stages fill one host after another. Messages cross the link between two stages one after another,
forward and backward independently; inside a host at its own rate. After each batch all stages
update together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import numpy as np

from stratagem.errors import UsageError
from stratagem.plan.configuration import PARTS
from stratagem.plan.simulation.spread import Seconds, Spread
from stratagem.rules.schedules import SCHEDULES, Op, bubble
from stratagem.rules.timeline import HandOver, Timeline, timeline
from stratagem.wire.simulated import Topology


@dataclass(frozen=True)
class StageScenario:
    """A training of `steps` batches through stages that are equal except for `slow`.

    compute    seconds of a batch on one device, divided evenly over stages and microbatches
    crossing   bytes of a batch at each cut, as many backward as forward
    forward    the part of the computation that is forward
    links      bytes a second of the link behind a stage, if it is not the topology's
    slow       by stage, the factor by which it takes longer
    """

    stages: int
    microbatches: int
    steps: int
    compute: Spread
    crossing: float
    topology: Topology
    schedule: str = "1f1b"
    update: float = 0.0
    forward: float = 1 / 3
    links: Mapping[int, float] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "steps"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise UsageError(f"{name} of a pipeline is {value!r}; it is 1 or more.")
        if self.schedule not in SCHEDULES:
            raise UsageError(
                f"schedule {self.schedule!r} is not known; choose one of {', '.join(SCHEDULES)}."
            )
        if not all(0 <= i < self.stages - 1 and rate > 0 for i, rate in self.links.items()):
            raise UsageError(
                f"links of a pipeline are those behind stage 0 to {self.stages - 2}, with rates "
                "above 0."
            )
        if not all(0 <= i < self.stages and 0 < times < inf for i, times in self.slow.items()):
            raise UsageError(f"slow names stages 0 to {self.stages - 1}, and times above 0.")
        if not (isfinite(self.crossing) and self.crossing >= 0 and 0 < self.forward < 1):
            raise UsageError("what crosses a cut is 0 bytes or more, and forward a part below 1.")

    @property
    def parts(self) -> int:
        """The number of parts of the model on each stage."""
        return PARTS[self.schedule]

    @property
    def without_links(self) -> StageScenario:
        """The same scenario with messages that take no time."""
        free = replace(self.topology, rate=inf, latency=0.0, inside_rate=inf, inside_latency=0.0)
        return replace(self, topology=free, links={})


@dataclass(frozen=True)
class StageRun:
    """The time line of every batch of a scenario."""

    scenario: StageScenario
    lines: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        return sum(line.seconds + self.scenario.update for line in self.lines)

    @property
    def step(self) -> float:
        return self.seconds / len(self.lines)

    @property
    def bubble(self) -> float:
        """The share of the stages' time, updates apart, in which they wait."""
        whole = sum(line.seconds for line in self.lines) * self.scenario.stages
        busy = sum(sum(line.busy) for line in self.lines)
        return 1 - busy / whole if whole else 0.0

    @property
    def least_bubble(self) -> float:
        """The bubble with equal stages and free links."""
        scenario = self.scenario
        return bubble(scenario.stages, scenario.microbatches, scenario.parts)

    @property
    def busy(self) -> tuple[float, ...]:
        """The part of the time in which each stage works."""
        whole = self.seconds or 1.0
        stages = range(self.scenario.stages)
        return tuple(sum(line.busy[stage] for line in self.lines) / whole for stage in stages)


def simulate_stages(scenario: StageScenario) -> StageRun:
    """Run every batch through the schedule; the same seed gives the same run."""
    draws = _draws(scenario)
    return StageRun(scenario, tuple(_line(scenario, draws[step]) for step in range(scenario.steps)))


def _draws(scenario: StageScenario) -> Seconds:
    """Draw the seconds of a batch for each step, stage and microbatch, forward and backward."""
    shape = (scenario.microbatches, 2 * scenario.parts)
    columns = [
        scenario.compute.draw(
            np.random.default_rng([scenario.seed, stage]), scenario.steps * shape[0] * shape[1]
        ).reshape(scenario.steps, *shape)
        * scenario.slow.get(stage, 1.0)
        for stage in range(scenario.stages)
    ]
    return np.stack(columns, axis=1)


def _line(scenario: StageScenario, drawn: Seconds) -> Timeline:
    stages, parts, many = scenario.stages, scenario.parts, scenario.microbatches
    share = 1 / (stages * parts * many)

    def seconds(op: Op, computing: int) -> float:
        place = 2 * (op.part // stages) + (op.kind == "B")
        kind = scenario.forward if op.kind == "F" else 1 - scenario.forward
        return float(drawn[op.part % stages, op.microbatch, place]) * share * kind

    def hand_over(op: Op) -> HandOver:
        to = op.part + (1 if op.kind == "F" else -1)
        return way(scenario, op.part % stages, to % stages)

    return timeline(SCHEDULES[scenario.schedule], stages, many, parts, seconds, hand_over)


def way(scenario: StageScenario, source: int, to: int) -> HandOver:
    """Return the seconds of sending a microbatch from one stage to another."""
    shape, size = scenario.topology, scenario.crossing / scenario.microbatches
    if shape.host(source) == shape.host(to):
        rate, latency = shape.inside_rate, shape.inside_latency
    else:
        rate, latency = shape.rate, shape.latency
    if abs(source - to) == 1:
        rate = scenario.links.get(min(source, to), rate)
    return HandOver(size / rate, latency)
