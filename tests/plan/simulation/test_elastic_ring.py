"""Simulated replicas that are killed and join, against times by hand and measured hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.plan.simulate import SimulatedRing, simulate
from stratagem.plan.simulation.scenario import (
    Cut,
    Fault,
    Kill,
    Regrouping,
    Scenario,
    Stall,
    Work,
    schedule,
)
from stratagem.plan.simulation.spread import Constant
from stratagem.wire.simulated import Topology
from tests.clock import unless_late
from tests.host_jobs import HostJob
from tests.hosts import Hosts, needs_hosts


def job(*faults: Fault, steps: int = 20, least: int = 1, push: float = 0.0) -> Scenario:
    """Four replicas, steps of a second, half a second to regroup."""
    work = Work(Constant(1.0), push=push)
    elastic = Regrouping(0.5, least)
    return Scenario(4, steps, work, Topology(1e9), servers=0, faults=faults, elastic=elastic)


def test_a_kill_costs_the_step_under_way_and_larger_shares() -> None:
    run = simulate(job(Kill(2, 5.25)))
    assert run.updates[4] == 5.0
    assert run.updates[5] == pytest.approx(5.25 + 0.5 + 4 / 3), "the step is done again by three"
    assert run.seconds == pytest.approx(5.75 + 15 * 4 / 3)
    assert len(run.updates) == 20 and run.stats.abandoned == 4 and not run.failure


def test_one_that_is_back_interrupts_a_step_and_gets_the_values() -> None:
    run = simulate(job(Kill(2, 5.25, back=3.0), push=1e8), trace=True)
    reduced = 2 * 3 / 4 * 0.1  # of 100 MB around four, at 1 GB/s
    alone = 4 / 3 + 2 * 2 / 3 * 0.1
    back = 8.25
    done = [when for when in run.updates if 5.25 < when < back]
    assert done == pytest.approx([5.25 + 0.5 + alone]), "one step by three"
    later = [when for when in run.updates if when > back]
    assert later[0] == pytest.approx(back + 0.5 + 0.1 + 1 + reduced), "the values travel first"
    assert [event[1] for event in run.trace if event[1] != "update"] == ["leave", "join"]


def test_silence_is_waited_for_or_given_up() -> None:
    for kind, lost in ((Stall, 3.0), (Cut, 2.5)):  # one that is cut off computes meanwhile
        short = simulate(replace(job(kind(1, 2.5, 3.0)), patience=4.0))
        assert short.seconds == pytest.approx(20 + lost) and short.stats.abandoned == 0
        long = simulate(replace(job(kind(1, 2.5, 9.0)), patience=4.0))
        # given up at 6.5, three until 11.5, then four again
        assert [when for when in long.updates if 2.5 < when < 11.5] == pytest.approx(
            [7.0 + 4 / 3 * i for i in (1, 2, 3)]
        )
        assert long.seconds == pytest.approx(12.0 + (20 - 2 - 3))


def test_who_ends_the_job() -> None:
    assert "the chief" in simulate(job(Kill(0, 3.0, back=1.0))).failure
    assert "2 replicas are left" in simulate(job(Kill(1, 3.5), Kill(2, 6.5), least=3)).failure
    waited = simulate(job(Kill(1, 3.5), Kill(2, 6.5, back=9.0), least=3))
    assert not waited.failure and waited.seconds > 15.5
    in_vain = (Kill(1, 3.2, back=0.3), Kill(2, 3.3), Kill(3, 3.4), Kill(1, 3.6))
    assert not simulate(job(*in_vain[:3])).failure
    assert "no step since" in simulate(job(*in_vain)).failure
    with pytest.raises(UsageError, match="servers=0"):
        replace(job(), servers=1)


@given(st.integers(0, 10**6), st.integers(0, 8), st.floats(0, 30.0))
@settings(deadline=None, max_examples=40)
def test_every_step_is_done_once(seed: int, count: int, patience: float) -> None:
    faults = schedule(seed, 4, 20.0, count, chief=True)
    run = simulate(replace(job(*faults, push=1e7), patience=patience, seed=seed), trace=True)
    assert list(run.updates) == sorted(set(run.updates))
    steps = [event[3][0] for event in run.trace if event[1] == "update"]
    assert steps == list(range(1, len(run.updates) + 1))
    assert run.failure or len(steps) == 20
    calm = SimulatedRing(job(push=1e7)).run()
    assert run.failure or run.seconds >= calm.seconds - 1e-9
    if not count:
        assert run.updates == calm.updates


SOURCE = """
import time
import torch
import stratagem as sg
from tests.strategies.test_elastic import net, rows
torch.set_num_threads(1)
strategy = sg.MultiWorkerMirroredStrategy(elastic=True, patience=sg.Patience(arrive=60, answer=4))
seen = 0

class Say(sg.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        print("step", seen, flush=True)

class Rows:
    "A loss that takes its time for each row."
    def __call__(self, output, target):
        time.sleep(len(target) * %(row)r)
        return torch.nn.functional.cross_entropy(output, target)

x, y = rows()
x = x.float()
with strategy.scope(check=False):
    model = sg.Model(net())
    model.compile("sgd", Rows())
model.fit(x[:288], y[:288], batch_size=36, epochs=%(epochs)d, verbose=0, callbacks=[Say()])
"""


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(300)
def test_the_rate_is_that_of_hosts() -> None:
    """Three real hosts: one is cut off for longer than patience, one is killed and joins again."""
    row, epochs = 0.012, 40  # 144 ms a step on three hosts, 216 on two
    faults = [
        "cut worker 1 at step 60 for 8 s",
        "kill worker 2 at step 150",
        "start worker 2 at step 155",
    ]
    source = SOURCE % {"row": row, "epochs": epochs}
    with Hosts(3) as hosts, HostJob(hosts, source, faults) as done:
        assert done.ends(240) == [0, 0, 0], str(done)
        ends = [when for when, line in done.tasks[0][-1].lines if line.startswith("step ")]
        joined = done.said(0, "worker 2 (10.77.31.3:2222) joins", done.when["kill", 2])
        happened = dict(done.when)
    steps, start = len(ends), ends[9]  # the first few are slow
    calm = (ends[58] - start) / 49
    scenario = Scenario(
        3,
        steps - 10,
        Work(Constant(12 * row), update=max(0.0, calm - 12 * row)),
        Topology(1e9),
        servers=0,
        patience=4.0,
        faults=(
            Cut(1, happened["cut", 1] - start, 8.0),
            Kill(2, happened["kill", 2] - start, back=joined - happened["kill", 2]),
        ),
        elastic=Regrouping(),
    )
    predicted, took = simulate(scenario), ends[-1] - start
    assert not predicted.failure and steps == 8 * epochs
    undisturbed = simulate(replace(scenario, faults=(), elastic=None)).seconds
    assert took > 1.15 * undisturbed, "the faults cost something"
    unless_late(
        abs(predicted.seconds / took - 1) < 0.1,
        f"{steps - 10} steps took {took:.1f} s, predicted {predicted.seconds:.1f} s "
        f"(without faults {undisturbed:.1f} s)",
    )
