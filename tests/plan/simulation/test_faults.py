"""Faults in simulated time: silence counts from its beginning, over several faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stratagem.plan.simulate import simulate
from stratagem.plan.simulation.scenario import Cut, Fault, Kill, Scenario, SimulatedRun, Stall, Work
from stratagem.plan.simulation.spread import Constant, Lognormal, ShiftedExponential
from stratagem.rules.updates import Asynchronous, Synchronous
from stratagem.wire.simulated import Topology

pytestmark = pytest.mark.timeout(60)


def steps(*faults: Fault, workers: int = 2, per_host: int = 1, **given: object) -> SimulatedRun:
    """Fifty steps of a second without communication; a worker is lost after ten silent seconds."""
    usual: dict[str, object] = {
        "workers": workers,
        "steps": 50,
        "work": Work(Constant(1.0)),
        "patience": 10.0,
        "topology": Topology(1e9, per_host=per_host),
        "faults": faults,
    }
    return simulate(Scenario(**{**usual, **given}), trace=True)  # type: ignore[arg-type]


# --- silence ------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_a_cut_takes_everybody_of_a_host_away(per_host: int) -> None:
    # given up at 15.5, their parts are made by others, and from then on a step takes two rounds
    run = steps(Cut(2, 5.5, 1000.0), workers=8, per_host=per_host)
    assert run.seconds == pytest.approx(16.5 + 44 * 2)


def test_who_was_cut_off_with_its_host_comes_back() -> None:
    run = steps(Cut(2, 5.5, 12.0), workers=4, per_host=2)
    back = {worker: at for at, what, worker, _ in run.trace if what == "join" and at}
    assert back == {2: 17.5, 3: 17.5}


def test_a_new_process_does_not_inherit_a_stall() -> None:
    again = steps(Stall(0, 5.5, 1000.0), Kill(0, 5.6, back=0.5))
    assert again.seconds == pytest.approx(steps(Kill(0, 5.6, back=0.5)).seconds)


def test_two_stalls_that_touch_are_one_silence() -> None:
    two = (Stall(0, 5.5, 9.0), Stall(0, 13.5, 9.0))
    assert steps(*two).updates == steps(Stall(0, 5.5, 17.0)).updates
    # given up at 15.5; the other makes both parts, and is alone until 22.5
    assert steps(*two).updates[5] == pytest.approx(16.5)
    assert steps(Stall(0, 5.5, 9.0), Stall(0, 15.5, 9.0)).updates[5] == pytest.approx(15.0)


def test_a_stall_and_a_cut_are_one_silence_too() -> None:
    run = steps(Stall(0, 5.5, 9.0), Cut(0, 13.5, 9.0))
    assert run.updates[5] == pytest.approx(16.5)
    assert [at for at, what, worker, _ in run.trace if what == "join" and worker == 0] == [0, 22.5]


def test_no_process_joins_from_a_host_that_is_cut_off() -> None:
    run = steps(Cut(0, 5.5, 8.0), Kill(0, 6.0, back=1.0))
    assert [at for at, what, worker, _ in run.trace if what == "join" and worker == 0] == [0, 13.5]


@pytest.mark.parametrize(
    ("faults", "end"),
    [
        ((Stall(0, 5.5, 17.0),), 15.5),
        ((Stall(0, 5.5, 9.0), Stall(0, 13.5, 9.0)), 15.5),
        ((Stall(1, 5.5, 9.0), Cut(0, 13.5, 9.0)), 15.5),
        ((Stall(0, 5.5, 9.0), Stall(2, 13.5, 9.0)), 0),
    ],
)
def test_silence_ends_a_circle(faults: tuple[Fault, ...], end: float) -> None:
    run = steps(*faults, workers=4, per_host=2, servers=0)
    assert bool(run.failure) == bool(end) and (not end or run.seconds == end)


def test_who_is_dead_cannot_be_killed_again() -> None:
    for back in (0.0, 1.0):
        again = steps(Kill(1, 1.0), Kill(1, 2.0, back), updates=Asynchronous())
        assert again.updates == steps(Kill(1, 1.0), updates=Asynchronous()).updates
    later = steps(Kill(1, 1.0, back=20.0), Kill(1, 2.0, back=1.0), updates=Asynchronous())
    assert [at for at, what, worker, _ in later.trace if what == "join" and worker] == [0.0, 21.0]


def test_nothing_is_computed_while_a_worker_stands_still() -> None:
    for buckets in (((1.0, 1.0),), ((0.5, 0.5), (0.5, 1.0))):
        for seconds in (0.2, 3.0):
            run = steps(Stall(1, 5.3, seconds), work=Work(Constant(1.0), buckets=buckets))
            assert run.seconds == pytest.approx(50 + seconds)


# --- nothing before its time ----------------------------------------------------------------------

NEAR = Topology(100.0, per_host=2, inside_rate=500.0)
SCENES = {
    "spares": Scenario(
        4,
        40,
        Work(ShiftedExponential(0.5, 1.0), push=100.0),
        Topology(1000.0, 0.01),
        Synchronous(spares=1),
        seed=3,
    ),
    "ties": Scenario(4, 40, Work(Constant(1.0), push=100.0, update=0.2), NEAR, servers=2),
    "two on a host": Scenario(
        4,
        40,
        Work(ShiftedExponential(0.5, 1.0), push=100.0, update=0.2),
        NEAR,
        servers=2,
        seed=46,
    ),
    "late ones stop": Scenario(
        3,
        40,
        Work(Lognormal(1.0, 0.5), push=400.0),
        Topology(1000.0, 0.01, per_host=2, inside_rate=500.0),
        Synchronous(spares=2),
        seed=31,
    ),
    "asynchronous": Scenario(
        4,
        160,
        Work(Constant(0.1), push=1e6),
        Topology(1e8, 1e-3),
        Asynchronous(),
        servers=3,
    ),
    "in pieces": Scenario(
        4,
        40,
        Work(Lognormal(0.1, 0.3), push=1e6, buckets=((0.5, 0.5), (0.5, 1.0))),
        Topology(1e8, 1e-3),
        Synchronous(spares=1),
        servers=2,
    ),
}


@pytest.mark.parametrize("fault", [Kill(0, 1e9), Stall(0, 1e9, 1.0), Cut(0, 1e9, 1.0)], ids=str)
@pytest.mark.parametrize("scene", SCENES)
def test_a_fault_after_the_end_changes_nothing(scene: str, fault: Fault) -> None:
    given = SCENES[scene]
    found = simulate(replace(given, faults=(fault,)), trace=True)
    assert found.digest == simulate(given, trace=True).digest


@pytest.mark.parametrize("kind", [Kill, Stall, Cut])
@pytest.mark.parametrize("scene", SCENES)
def test_a_fault_changes_nothing_before_its_time(scene: str, kind: type[Stall]) -> None:
    given = SCENES[scene]
    whole = simulate(given, trace=True)
    for part in (0.11, 0.5, 0.83):
        at = part * whole.seconds
        found = simulate(replace(given, faults=(kind(1, at, 0.4),)), trace=True)
        before = [event for event in whole.trace if event[0] < at]
        assert [event for event in found.trace if event[0] < at] == before and len(before) > 20


# --- several servers ------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [(0.1, 0.9), (0.9, 0.1)])
def test_an_update_is_made_when_the_fullest_server_has_made_it(shards: tuple[float, ...]) -> None:
    run = steps(workers=1, steps=1, work=Work(Constant(1.0), update=1.0), servers=2, shards=shards)
    assert run.seconds == pytest.approx(1.9)
