"""Simulated all-reduce, compared with the closed forms and with random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.plan.simulate import simulate
from stratagem.plan.simulation.scenario import Cut, Fault, Kill, Scenario, Stall, Work
from stratagem.plan.simulation.spread import Constant, Lognormal, ShiftedExponential
from stratagem.wire.simulated import Topology


def circle(workers: int, work: Work, topology: Topology, steps: int = 10) -> Scenario:
    return Scenario(workers, steps, work, topology, servers=0)


def test_one_replica_has_nobody_to_talk_to() -> None:
    run = simulate(circle(1, Work(Constant(0.1), push=1e9, update=0.01), Topology(1.0, 1.0)))
    assert run.seconds == pytest.approx(10 * 0.11)


def test_a_ring_of_four() -> None:
    run = simulate(circle(4, Work(Constant(0.1), push=1e6), Topology(1e7, 0.001)))
    assert run.seconds == pytest.approx(10 * (0.1 + 6 * 0.001 + 1.5 * 0.1))


def test_buckets_travel_during_backward() -> None:
    work = Work(Constant(0.1), push=1e6, buckets=((0.5, 0.5), (0.5, 1.0)))
    run = simulate(circle(2, work, Topology(1e7)))
    assert run.seconds == pytest.approx(10 * (0.1 + 0.05)), "the first half costs nothing"


def test_inside_a_host_first() -> None:
    shape = Topology(1e7, per_host=2, inside_rate=1e8)
    run = simulate(circle(4, Work(Constant(0.1), push=1e6), shape))
    assert run.seconds == pytest.approx(10 * (0.1 + 0.01 + 0.1))


@pytest.mark.parametrize(
    ("workers", "shape", "rate"),
    [
        (8, Topology(1e7, per_rack=4, rack_rate=1e6), 1e6),
        (8, Topology(1e7, per_rack=4), 1e7),
        (8, Topology(1e7, per_rack=4, rack_rate=1e8), 1e7),
        (5, Topology(1e7, 0, 1, per_rack=4, rack_rate=1e6), 1e6),
        (8, Topology(1e7, per_rack=8, rack_rate=1e6), 1e7),
        (8, Topology(1e7, per_host=2, per_rack=4, rack_rate=1e6), 1e7),
        (8, Topology(1e7, per_host=2, per_rack=2, rack_rate=1e6), 1e6),
    ],
)
def test_a_ring_that_leaves_its_rack_is_no_faster_than_the_way_out(
    workers: int, shape: Topology, rate: float
) -> None:
    run = simulate(circle(workers, Work(Constant(0.1), push=1e6), shape))
    hosts = workers // shape.per_host
    assert run.seconds == pytest.approx(10 * (0.1 + 2 * (hosts - 1) / hosts * 1e6 / rate))


@given(
    st.integers(1, 64),
    st.floats(0, 1e8),
    st.floats(1e5, 1e10),
    st.floats(0, 1e-3),
    st.floats(1e-4, 1.0),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_time_falls_with_bandwidth_and_grows_with_bytes(
    n: int, size: float, rate: float, latency: float, compute: float, seed: int
) -> None:
    given = replace(
        circle(n, Work(Lognormal(compute, 0.3), push=size), Topology(rate, latency), steps=3),
        seed=seed,
    )
    usual = simulate(given).seconds
    assert simulate(replace(given, topology=Topology(rate * 2, latency))).seconds <= usual
    assert simulate(replace(given, work=replace(given.work, push=size * 2))).seconds >= usual
    alone = simulate(
        replace(given, work=replace(given.work, push=0.0), topology=Topology(rate))
    ).seconds
    assert usual >= alone
    assert n > 1 or usual == alone


def test_the_slowest_of_n_agrees_with_the_closed_form() -> None:
    work = Work(ShiftedExponential(0.1, 0.2))
    run = simulate(circle(16, work, Topology(1e9), steps=4000))
    assert run.seconds / 4000 == pytest.approx(
        0.1 + sum(1 / i for i in range(1, 17)) / 10.0, rel=0.02
    )


def test_one_that_stands_still_is_waited_for_and_one_that_dies_ends_it() -> None:
    given = circle(4, Work(Constant(0.1)), Topology(1e9))
    stalled = simulate(replace(given, faults=(Stall(2, 0.35, 5.0),)))
    assert stalled.seconds == pytest.approx(1.0 + 5.0) and not stalled.failure
    for faults, word in (((Stall(2, 0.35, 5.0),), "worker 2"), ((Kill(1, 0.35),), "worker 1")):
        ended = simulate(replace(given, faults=faults, patience=1.0))
        assert word in ended.failure and len(ended.updates) == 3


@pytest.mark.parametrize(
    ("faults", "more"),
    [
        ((Stall(1, 0.32, 5.0),), 5.0),
        ((Stall(1, 0.17, 5.0),), 5.0),
        ((Cut(1, 0.17, 5.0),), 5.0),
        ((Cut(1, 0.02, 0.06),), 0.0),
        ((Cut(1, 0.02, 0.1),), 0.02),
        ((Stall(1, 0.17, 0.5), Cut(2, 0.42, 0.5)), 0.75),
        ((Stall(1, 0.02, 0.1), Stall(3, 0.03, 0.05)), 0.1),
        ((Stall(1, 50.0, 5.0),), 0.0),
    ],
)
def test_a_stall_counts_at_any_time_and_a_cut_while_gradients_travel(
    faults: tuple[Fault, ...], more: float
) -> None:
    """A step computes for 0.1 s, and its gradient travels for 0.15 s."""
    given = circle(4, Work(Constant(0.1), push=1e6), Topology(1e7))
    run = simulate(replace(given, faults=faults))
    assert run.seconds == pytest.approx(10 * 0.25 + more)


def test_a_cut_of_the_only_host_hurts_nobody() -> None:
    given = circle(4, Work(Constant(0.1), push=1e6), Topology(1e7, per_host=4, inside_rate=1e9))
    assert simulate(replace(given, faults=(Cut(1, 0.101, 500.0),))) == simulate(given)


def test_who_stands_still_while_gradients_travel_is_given_up_too() -> None:
    given = circle(4, Work(Constant(0.1), push=1e6), Topology(1e7))
    run = simulate(replace(given, faults=(Stall(2, 0.2, 500.0),)))
    assert "worker 2" in run.failure and run.seconds == pytest.approx(60.2) and not run.updates


def test_the_same_seed_gives_the_same_trace() -> None:
    given = circle(8, Work(Lognormal(0.1, 0.5), push=1e6), Topology(1e8))
    again, other = simulate(given, trace=True), simulate(replace(given, seed=1), trace=True)
    assert simulate(given, trace=True).digest == again.digest != other.digest
