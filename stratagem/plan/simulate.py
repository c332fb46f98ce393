"""Trainings at sizes that nobody here owns: the real rules, in virtual time.

    run = simulate(Scenario(workers=1000, servers=16, steps=1000, ...))
    run.rate, run.stats, run.failure

With servers a `ServerJob` runs. Without them the workers all-reduce, in a `SimulatedRing`, in an
`ElasticRing` that goes on when one of them is killed or joins, or now and then in a `MeetingRing`.
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
    """How long a training takes, and its statistics; `trace` keeps everything that happened."""
    if scenario.servers:
        return ServerJob(scenario, Idle(scenario), trace=trace).run()
    if scenario.sync is not None and not isinstance(scenario.sync, EveryStep):
        return MeetingRing(scenario, trace=trace).run()
    kind = SimulatedRing if scenario.elastic is None else ElasticRing
    return kind(scenario, trace=trace).run()
