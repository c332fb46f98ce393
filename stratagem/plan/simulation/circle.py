"""Simulated all-reduce: every replica computes, buckets go around the circle, all step together.

    c_j = max(c_{j-1}, the last replica's bucket j is ready) + T(bytes of j)

All links are alike and everybody sends to its neighbour at the same moment, so a round of the
circle takes what one link takes; no event is needed for it.
"""

from __future__ import annotations

import numpy as np

from stratagem.plan.formulas import hierarchical, ring
from stratagem.plan.simulation.faults import Cut, Kill, Stall
from stratagem.plan.simulation.scenario import Event, Run, Scenario
from stratagem.plan.simulation.spread import Seconds
from stratagem.rules.stats import Stats


class Circle:
    """All of one simulated job without servers."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.trace: list[Event] = []
        self._traces = trace
        self._costs = [
            all_reduce(scenario, scenario.work.push * part) for part, _ in scenario.work.buckets
        ]
        self._readies = np.array([ready for _, ready in scenario.work.buckets])

    def run(self) -> Run:
        """Step after step; a killed replica ends it, as it does in real jobs."""
        scenario, now, updates = self.scenario, 0.0, list[float]()
        compute = self._compute()
        end, why = self._death()
        for step in range(scenario.steps):
            busy = compute[step] + self._held_up(now, now + float(compute[step].max()))
            now = self._reduced(now, busy) + scenario.work.update
            if now > end:
                return self._told(updates, end, why)
            updates.append(now)
            if self._traces:
                self.trace.append((now, "update", int(busy.argmax()), (step + 1,)))
        return self._told(updates, now, "")

    def _compute(self) -> Seconds:
        """Seconds of every step and replica, each replica's from a seed of its own."""
        scenario = self.scenario
        columns = [
            scenario.work.compute.draw(np.random.default_rng([scenario.seed, w]), scenario.steps)
            * scenario.slow.get(w, 1.0)
            for w in range(scenario.workers)
        ]
        return np.stack(columns, axis=1)

    def _reduced(self, start: float, busy: Seconds) -> float:
        """When the last bucket has gone around."""
        done = start
        last = float(busy.max())
        for ready, cost in zip(self._readies, self._costs, strict=True):
            done = max(done, start + last * float(ready)) + cost
        return max(done, start + last)

    def _held_up(self, start: float, until: float) -> Seconds:
        """Seconds by which stalls and cuts that begin in this step prolong it, by replica."""
        more = np.zeros(self.scenario.workers)
        for fault in self.scenario.faults:
            if isinstance(fault, Stall | Cut) and start <= fault.at < until:
                more[fault.worker] += fault.seconds
        return more

    def _death(self) -> tuple[float, str]:
        """When somebody is missed for good, and who."""
        ends = [(np.inf, "")]
        for fault in self.scenario.faults:
            if isinstance(fault, Kill):
                ends.append((fault.at, f"worker {fault.worker} is gone, so the job ends"))
            elif isinstance(fault, Stall | Cut) and fault.seconds > self.scenario.patience:
                at = fault.at + self.scenario.patience
                ends.append((at, f"worker {fault.worker} does not answer, so the job ends"))
        return min(ends)

    def _told(self, updates: list[float], now: float, why: str) -> Run:
        count = len(updates) * self.scenario.workers
        stats = Stats(received=count, applied=count, updates=len(updates))
        return Run(now, tuple(updates), stats, tuple(self.trace), why)


def all_reduce(scenario: Scenario, size: float) -> float:
    """Seconds in which so many bytes are added up over all workers."""
    shape, workers = scenario.topology, scenario.workers
    if workers == 1:
        return 0.0
    if shape.per_host == 1:
        return ring(size, workers, shape.latency, shape.rate)
    hosts = -(-workers // shape.per_host)
    return hierarchical(
        size, hosts, min(workers, shape.per_host),
        inside=(shape.inside_latency, shape.inside_rate), between=(shape.latency, shape.rate),
    )  # fmt: skip
