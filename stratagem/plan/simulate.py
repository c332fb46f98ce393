"""Trainings at sizes that nobody here owns: the real rules, in virtual time.

    run = simulate(Scenario(workers=1000, servers=16, steps=1000, ...))
    run.rate, run.stats, run.failure
"""

from __future__ import annotations

from stratagem.plan.simulation.circle import Circle
from stratagem.plan.simulation.office import Office
from stratagem.plan.simulation.scenario import Run, Scenario
from stratagem.plan.simulation.trains import Idle


def simulate(scenario: Scenario, *, trace: bool = False) -> Run:
    """How long a training takes, and what its books say; `trace` keeps everything that happened."""
    if scenario.servers:
        return Office(scenario, Idle(scenario), trace=trace).run()
    return Circle(scenario, trace=trace).run()
