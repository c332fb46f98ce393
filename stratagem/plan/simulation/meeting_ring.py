"""Replicas that all-reduce every few steps (`sync=`), in virtual time, each with its own clock.

The cadence of real trainings decides when replicas meet. A meeting waits for the last replica and
for the link; a fragment that is sent during training is waited for when its outer step is due. With
gossip a replica waits for its neighbours.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stratagem.errors import UsageError
from stratagem.plan.simulation.ring import SimulatedRing, carried
from stratagem.plan.simulation.scenario import Scenario, SimulatedRun
from stratagem.plan.simulation.spread import Seconds
from stratagem.rules.cadence import Cadence, DiLoCo, Gossip, LocalSteps
from stratagem.strategies.mirrored import meeting
from stratagem.training.settings import Settings


class MeetingRing(SimulatedRing):
    """A simulated job whose replicas train independently between meetings."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        super().__init__(replace(scenario, wire=None), trace=trace)
        sync = meeting(Settings(wire=scenario.wire), scenario.sync).sync
        assert sync is not None
        if scenario.faults or scenario.elastic is not None:
            raise UsageError(
                f"sync={sync!r} is simulated on a day without faults; leave sync or the faults out."
            )
        if isinstance(sync, Gossip) and scenario.topology.per_host > 1:
            raise UsageError(f"sync={sync!r} is simulated with one worker a host: per_host=1.")
        self._sync, self._cadence = sync, Cadence(sync)
        wire = sync.wire if isinstance(sync, LocalSteps | DiLoCo) else None
        part = scenario.work.push / self._cadence.fragments
        #: seconds of the all-reduce of a fragment
        self._meeting = carried(replace(scenario, wire=wire), part)

    def run(self) -> SimulatedRun:
        """Run step after step, and the meeting at the end."""
        cadence, update = self._cadence, self.scenario.work.update
        clocks, there, updates = np.zeros(self.scenario.workers), 0.0, list[float]()
        for turn, busy in enumerate(self.computing()):
            alike = cadence.together
            clocks = clocks + busy if not alike else clocks * 0 + self._reduced(clocks[0], busy)
            clocks += update
            sent = cadence.updated()
            if isinstance(self._sync, Gossip):
                clocks = self._mixed(clocks, self._sync, turn)
            if sent is not None:
                there = float(clocks.max()) + self._meeting
            if cadence.ends:
                clocks[:] = max(float(clocks.max()), there)
                cadence.ended(alike=False)
            updates.append(float(clocks.max()))
            if self._traces:
                self.trace.append((updates[-1], "update", int(clocks.argmax()), (turn + 1,)))
        end = max(float(clocks.max()), there if cadence.under_way is not None else 0.0)
        return self._result(updates, end + self._meeting * sum(map(bool, cadence.unmet)), "")

    def _mixed(self, clocks: Seconds, gossip: Gossip, turn: int) -> Seconds:
        """Return the time at which each replica has its neighbours' weights."""
        workers, shape = self.scenario.workers, self.scenario.topology
        found = np.zeros_like(clocks)
        for rank in range(workers):
            last = max(clocks[other] for other in gossip.weights(rank, workers, turn))
            many = len(gossip.receivers(rank, workers, turn))
            took = many * self.scenario.work.push / shape.rate + (shape.latency if many else 0.0)
            found[rank] = last + took
        return found
