"""Synchronous replicas that all-reduce buckets in a ring, in virtual time.

    c_j = max(c_{j-1}, the last replica's bucket j is ready) + T(bytes of j)

All links are alike and all replicas send at the same moment, so a round of the ring takes as long
as one link, and needs no events. A ring in the order of the hosts leaves and enters each rack once,
so a rack's link carries as much as a host's. A stalled replica computes nothing, and while a
replica is stalled or cut off, the ring stands still.
"""

from __future__ import annotations

import numpy as np
import torch

from stratagem.codecs.codec import wire_type
from stratagem.codecs.compression import Compression
from stratagem.codecs.low_rank import PowerSGD
from stratagem.errors import UsageError
from stratagem.plan.formulas import hierarchical, ring
from stratagem.plan.lossy import sent_by
from stratagem.plan.simulation.scenario import (
    Cut,
    Event,
    Kill,
    Pause,
    Scenario,
    SimulatedRun,
    Stall,
    after,
    joined,
)
from stratagem.plan.simulation.spread import Seconds
from stratagem.rules.stats import Stats


class SimulatedRing:
    """A simulated job without servers."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.trace: list[Event] = []
        self._traces = trace
        self._costs = [
            carried(scenario, scenario.work.push * part) for part, _ in scenario.work.buckets
        ]
        self._readies = [ready for _, ready in scenario.work.buckets]
        self._stalls = pauses(scenario, (Stall,))
        # a cut has no effect on a single host
        apart = scenario.topology.host(scenario.workers - 1) > 0
        self._silent = pauses(scenario, (Stall, Cut)) if apart else self._stalls
        #: pauses of the ring, caused by any replica
        self._silences = sorted({p for pauses in self._silent.values() for p in pauses})

    def run(self) -> SimulatedRun:
        """Run step after step; a killed replica ends the job, as it does in real jobs."""
        scenario, now, updates = self.scenario, 0.0, list[float]()
        compute = self.computing()
        end, why = self._job_end()
        for step in range(scenario.steps):
            busy = compute[step]
            slowest = self._slowest(now, busy)
            now = after(self._reduced(now, busy), scenario.work.update, self._silences)
            if now > end:
                return self._result(updates, end, why)
            updates.append(now)
            if self._traces:
                self.trace.append((now, "update", slowest, (step + 1,)))
        return self._result(updates, now, "")

    def computing(self) -> Seconds:
        """Return the seconds of every step and replica, drawn from one seed for each replica."""
        scenario = self.scenario
        columns = [
            scenario.work.compute.draw(np.random.default_rng([scenario.seed, w]), scenario.steps)
            * scenario.slow.get(w, 1.0)
            for w in range(scenario.workers)
        ]
        return np.stack(columns, axis=1)

    def _reduced(self, start: float, busy: Seconds) -> float:
        """Return the time at which the last bucket is all-reduced."""
        done = start
        for ready, cost in zip(self._readies, self._costs, strict=True):
            begun = max(done, self._all_ready(start, busy, ready))
            done = after(begun, cost, self._silences)
        return max(done, self._all_ready(start, busy, 1.0))

    def _all_ready(self, start: float, busy: Seconds, part: float) -> float:
        """Return the time at which every replica has computed that part of its step."""
        last = start + float(busy.max()) * part
        late = (after(start, float(busy[w]) * part, p) for w, p in self._stalls.items())
        return max(last, *late) if self._stalls else last

    def _slowest(self, start: float, busy: Seconds) -> int:
        """Return the replica that has computed its step last."""
        ends = busy.copy()
        for worker, pauses in self._stalls.items():
            ends[worker] = after(start, float(busy[worker]), pauses) - start
        return int(ends.argmax())

    def _job_end(self) -> tuple[float, str]:
        """Return the time at which a lost worker ends the job, and a sentence that names it."""
        ends = [(np.inf, "")]
        for fault in self.scenario.faults:
            if isinstance(fault, Kill):
                ends.append((fault.at, f"worker {fault.worker} is gone, so the job ends"))
        for worker, pauses in self._silent.items():
            for begin, until in pauses:
                if until - begin > self.scenario.patience:
                    at = begin + self.scenario.patience
                    ends.append((at, f"worker {worker} does not answer, so the job ends"))
        return min(ends)

    def _result(self, updates: list[float], now: float, why: str) -> SimulatedRun:
        count = len(updates) * self.scenario.workers
        stats = Stats(received=count, applied=count, updates=len(updates))
        return SimulatedRun(now, tuple(updates), stats, tuple(self.trace), why)


def pauses(scenario: Scenario, kinds: tuple[type[Stall | Cut], ...]) -> dict[int, list[Pause]]:
    """Return the begin and end of all faults of these kinds, by worker."""
    found: dict[int, list[Pause]] = {}
    for fault in sorted(scenario.faults, key=lambda fault: fault.at):
        if isinstance(fault, Stall | Cut) and isinstance(fault, kinds):
            for worker in scenario.struck(fault):
                joined(found.setdefault(worker, []), fault.at, fault.at + fault.seconds)
    return found


def carried(scenario: Scenario, size: float) -> float:
    """Seconds of the all-reduce of `size` bytes of fp32 numbers over the scenario's wire.

    With a compression each worker sends every other one the slice that it adds up, and gets the
    sum; the workers of a host share its link. Encoding takes no time.
    """
    wire, workers, shape = scenario.wire, scenario.workers, scenario.topology
    if not isinstance(wire, Compression):
        return all_reduce(scenario, size / 4 * (wire_type(wire) or torch.float32).itemsize)
    if isinstance(wire, PowerSGD) or wire.dense_steps:
        raise UsageError(
            f"wire={wire!r} sends what depends on the shapes of a model or on the step; simulate "
            "real gradients (train_replicas), or ask `stratagem plan --lossy train.py`."
        )
    if workers == 1:
        return 0.0
    slices = sent_by(wire, ((max(1, round(size / 4)),),), 4, workers).slices
    near = min(workers, shape.per_host)
    return near * 2 * (workers - near) * slices / shape.rate + 2 * shape.latency


def all_reduce(scenario: Scenario, size: float) -> float:
    """Seconds of the all-reduce of `size` bytes over all workers."""
    shape, workers = scenario.topology, scenario.workers
    if workers == 1:
        return 0.0
    hosts = -(-workers // shape.per_host)
    racks = shape.per_rack and hosts > shape.per_rack
    rate = min(shape.rate, shape.rack_rate) if racks else shape.rate
    if shape.per_host == 1:
        return ring(size, workers, shape.latency, rate)
    return hierarchical(
        size,
        hosts,
        min(workers, shape.per_host),
        inside=(shape.inside_latency, shape.inside_rate),
        between=(shape.latency, rate),
    )
