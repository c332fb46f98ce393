"""Elastic all-reduce in virtual time: replicas are killed, cut off and join during a training.

    step 41            step 42                 step 42 again
    ├──────────────────┼────── x               ├────────────────────┤   worker 2 is killed at x:
    computes, reduces  │       regroups        │ larger shares      │   the others take its rows

A killed replica leaves at once; a silent replica leaves after `patience` seconds. Either joins
again when it is back. After each change the present replicas regroup, and repeat the interrupted
step with the same global batch. The rule of real jobs decides whether the job goes on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from stratagem.cluster.failure import Failure, Kind, Member
from stratagem.plan.simulation.ring import SimulatedRing, carried, pauses
from stratagem.plan.simulation.scenario import (
    Kill,
    Pause,
    Regrouping,
    Scenario,
    SimulatedRun,
    Stall,
    after,
    joined,
)
from stratagem.rules.stats import Stats
from stratagem.training.elastic import Again, Tries

#: time, worker, and whether it joins (or leaves)
_Change = tuple[float, int, bool]


class ElasticRing(SimulatedRing):
    """A simulated job whose replicas leave and join."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        super().__init__(scenario, trace=trace)
        assert scenario.elastic is not None
        self._how: Regrouping = scenario.elastic
        self._all_stalls = _capped(pauses(scenario, (Stall,)), scenario.patience)
        self._all_silent = _capped(self._silent, scenario.patience)
        self._changes = deque(self._membership_changes())
        self._present = set(range(scenario.workers))
        self._updates: list[float] = []
        self._tries = Tries(Again(lambda: len(self._updates)))
        self._given_up = 0

    def run(self) -> SimulatedRun:
        """Run step after step; a step during which a replica leaves or joins is done again."""
        scenario, now, compute = self.scenario, 0.0, self.computing()
        self._regroup()
        while len(self._updates) < scenario.steps:
            share = scenario.workers / len(self._present)
            here = np.isin(np.arange(scenario.workers), list(self._present))
            busy = np.where(here, compute[len(self._updates)] * share, 0.0)
            done = after(self._reduced(now, busy), scenario.work.update, self._silences)
            if self._changes and self._changes[0][0] <= done:
                self._given_up += len(self._present)
                now, why = self._change(now)
                if why:
                    return self._result(self._updates, now, why)
                continue
            now = done
            self._updates.append(now)
            if self._traces:
                self.trace.append((now, "update", int(busy.argmax()), (len(self._updates),)))
        return self._result(self._updates, now, "")

    def _change(self, now: float) -> tuple[float, str]:
        """Apply the next departure or arrival; returns when the next step begins, or why not."""
        at, worker, joins = self._changes.popleft()
        now = max(now, at)
        if self._traces:
            self.trace.append((at, "join" if joins else "leave", worker, (len(self._updates),)))
        if not worker and not joins:
            return now, "worker 0, the chief, is gone, so the job ends"
        (self._present.add if joins else self._present.discard)(worker)
        kind: Kind = "joined" if joins else "died"
        trouble = Failure(worker, Member(f"worker {worker}", ""), kind, "simulated")
        if not self._tries.left(trouble.error(), trouble):
            return now, f"worker {worker} is gone with no step since the last ones, so the job ends"
        if len(self._present) < self._how.least:
            if not self._changes:
                return now, f"{len(self._present)} replicas are left, so the job ends"
            return self._change(now)
        self._regroup()
        moved = self.scenario.work.fetched / self.scenario.topology.rate if joins else 0.0
        return after(now, self._how.seconds + moved, self._silences), ""

    def _regroup(self) -> None:
        """Compute a step's costs for the present replicas."""
        now = replace(self.scenario, workers=len(self._present), slow={}, faults=())
        work, here = self.scenario.work, self._present
        self._costs = [carried(now, work.push * part) for part, _ in work.buckets]
        self._stalls = {w: found for w, found in self._all_stalls.items() if w in here}
        self._silences = sorted(
            {pause for w, found in self._all_silent.items() if w in here for pause in found}
        )

    def _membership_changes(self) -> list[_Change]:
        """The departures and arrivals of all replicas, in order of time."""
        away: dict[int, list[Pause]] = {}
        for worker, silences in self._silent.items():
            for begin, until in silences:
                if until - begin > self.scenario.patience:
                    away.setdefault(worker, []).append((begin + self.scenario.patience, until))
        for fault in self.scenario.faults:
            if isinstance(fault, Kill):
                back = inf if fault.back is None else fault.at + fault.back
                away.setdefault(fault.worker, []).append((fault.at, back))
        found: list[_Change] = []
        for worker, absences in away.items():
            merged: list[Pause] = []
            for begin, until in sorted(absences):
                joined(merged, begin, until)
            found += [(begin, worker, False) for begin, _ in merged]
            found += [(until, worker, True) for _, until in merged if isfinite(until)]
        return sorted(found)

    def _result(self, updates: list[float], now: float, why: str) -> SimulatedRun:
        told = super()._result(updates, now, why)
        counts: Stats = replace(told.stats, abandoned=self._given_up)
        return replace(told, stats=counts)


def _capped(silent: dict[int, list[Pause]], patience: float) -> dict[int, list[Pause]]:
    """Shorten silences to `patience`, the longest time that replicas wait."""
    return {
        worker: [(begin, min(until, begin + patience)) for begin, until in found]
        for worker, found in silent.items()
    }
