"""Simulate trainings of any size: the real rules, in virtual time.

    run = simulate(Scenario(workers=1000, servers=16, steps=1000, ...))
    run.rate, run.stats, run.failure

A job with servers is a `ServerJob`. Without servers the workers all-reduce every step in a
`SimulatedRing`, every few steps in a `MeetingRing`, or in an `ElasticRing`, which goes on when a
worker is killed or joins.
"""

from __future__ import annotations

from stratagem.plan.simulation.elastic_ring import ElasticRing
from stratagem.plan.simulation.meeting_ring import MeetingRing
from stratagem.plan.simulation.ring import SimulatedRing as SimulatedRing
from stratagem.plan.simulation.scenario import Scenario, SimulatedRun
from stratagem.plan.simulation.server_job import ServerJob
from stratagem.plan.simulation.simulated_server import Idle
from stratagem.rules.cadence import EveryStep


def simulate(scenario: Scenario, *, trace: bool = False) -> SimulatedRun:
    """Simulate a training; `trace` keeps every event."""
    if scenario.servers:
        return ServerJob(scenario, Idle(scenario), trace=trace).run()
    if scenario.sync is not None and not isinstance(scenario.sync, EveryStep):
        return MeetingRing(scenario, trace=trace).run()
    kind = SimulatedRing if scenario.elastic is None else ElasticRing
    return kind(scenario, trace=trace).run()
