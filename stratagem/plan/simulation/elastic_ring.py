"""Replicas that all-reduce, and may be killed, cut off and join while the others go on.

    step 41            step 42                 step 42 again
    ├──────────────────┼────── x               ├────────────────────┤   worker 2 is killed at x:
    computes, reduces  │       comes together  │ larger shares      │   the others do its rows, too

A replica that is killed leaves at once; one that is silent leaves when patience is over. Both join
when they are back. Each time those who are here come together, and do the step again that was under
way, with the same global batch. Whether the job goes on is decided by the rule of real jobs.

Where replicas of one machine have standbys, one that is killed while it computes has its share done
again by another process; the others wait for that, and do nothing twice. Who is killed later in a
step, or before another stands by, is started again with all others.
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
from stratagem.plan.simulation.spread import Seconds
from stratagem.rules.stats import Stats
from stratagem.training.elastic import Again, Elastic, Tries

#: when, which worker, whether it joins
_Change = tuple[float, int, bool]


class ElasticRing(SimulatedRing):
    """All of one simulated job whose replicas leave and join."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        super().__init__(scenario, trace=trace)
        assert scenario.elastic is not None
        self._how: Regrouping = scenario.elastic
        self._all_stalls = _shorter(pauses(scenario, (Stall,)), scenario.patience)
        self._all_silent = _shorter(self._silent, scenario.patience)
        self._changes = deque(self._comings_and_goings())
        self._present = set(range(scenario.workers))
        self._updates: list[float] = []
        self._tries = Tries(Elastic(self._how.least), Again(lambda: len(self._updates)))
        self._given_up = 0
        #: kills that a standby may make up for, and from when on each replica has one
        stands_by = self._how.standby is not None
        kills = [(f.at, f.worker) for f in scenario.faults if isinstance(f, Kill) and f.worker]
        self._kills = deque(sorted(kills) if stands_by else ())
        self._ready = [self._how.standby or 0.0] * scenario.workers

    def run(self) -> SimulatedRun:
        """Run step after step, and those again that somebody has left or joined."""
        scenario, now, compute = self.scenario, 0.0, self.computing()
        self._come_together()
        while len(self._updates) < scenario.steps:
            share = scenario.workers / len(self._present)
            here = np.isin(np.arange(scenario.workers), list(self._present))
            busy = np.where(here, compute[len(self._updates)] * share, 0.0)
            done, lost = self._with_standbys(now, busy)
            if lost is not None or (self._changes and self._changes[0][0] <= done):
                self._given_up += len(self._present)
                now, why = self._change(now) if lost is None else self._start_again(*lost)
                if why:
                    return self._told(self._updates, now, why)
                continue
            now = done
            self._updates.append(now)
            if self._traces:
                self.trace.append((now, "update", int(busy.argmax()), (len(self._updates),)))
        return self._told(self._updates, now, "")

    def _with_standbys(self, now: float, busy: Seconds) -> tuple[float, tuple[float, int] | None]:
        """When a step is done, or which kill in it no standby makes up for."""
        update, share = self.scenario.work.update, busy.copy()
        while True:
            done = after(self._reduced(now, busy), update, self._silences)
            change = self._changes[0][0] if self._changes else inf
            if not self._kills or self._kills[0][0] > min(done, change):
                return done, None
            at, worker = self._kills.popleft()
            if worker not in self._present:
                continue
            if not (self._ready[worker] <= at and now <= at < now + busy[worker]):
                return done, (max(now, at), worker)
            busy[worker] = at - now + share[worker]
            self._ready[worker] = at + (self._how.standby or 0.0)

    def _start_again(self, at: float, worker: int) -> tuple[float, str]:
        """All replicas of the machine come together anew, after one of them was killed."""
        trouble = Failure(worker, Member(f"worker {worker}", ""), "died", "simulated")
        if not self._tries.left(trouble.error(), trouble):
            return at, f"worker {worker} is gone with no step since the last ones, so the job ends"
        begins = after(at, self._how.seconds, self._silences)
        self._ready = [begins + (self._how.standby or 0.0)] * self.scenario.workers
        return begins, ""

    def _change(self, now: float) -> tuple[float, str]:
        """One leaves or joins; when the next step begins, or why none does."""
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
        self._come_together()
        moved = self.scenario.work.fetched / self.scenario.topology.rate if joins else 0.0
        return after(now, self._how.seconds + moved, self._silences), ""

    def _come_together(self) -> None:
        """What a step costs those who are here."""
        now = replace(self.scenario, workers=len(self._present), slow={}, faults=())
        work, here = self.scenario.work, self._present
        self._costs = [carried(now, work.push * part) for part, _ in work.buckets]
        self._stalls = {w: found for w, found in self._all_stalls.items() if w in here}
        self._silences = sorted(
            {pause for w, found in self._all_silent.items() if w in here for pause in found}
        )

    def _comings_and_goings(self) -> list[_Change]:
        """Who is away from when to when, in order of time."""
        away: dict[int, list[Pause]] = {}
        for worker, silences in self._silent.items():
            for begin, until in silences:
                if until - begin > self.scenario.patience:
                    away.setdefault(worker, []).append((begin + self.scenario.patience, until))
        for fault in self.scenario.faults:
            if isinstance(fault, Kill) and (self._how.standby is None or not fault.worker):
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

    def _told(self, updates: list[float], now: float, why: str) -> SimulatedRun:
        told = super()._told(updates, now, why)
        counts: Stats = replace(told.stats, abandoned=self._given_up)
        return replace(told, stats=counts)


def _shorter(silent: dict[int, list[Pause]], patience: float) -> dict[int, list[Pause]]:
    """For how long the others wait for one that is silent."""
    return {
        worker: [(begin, min(until, begin + patience)) for begin, until in found]
        for worker, found in silent.items()
    }
