"""Simulated parameter servers: time, rules and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.plan.simulate import simulate
from stratagem.plan.simulation.scenario import (
    Cut,
    Kill,
    Overhead,
    Scenario,
    ServerDeath,
    SimulatedRun,
    Stall,
    Work,
    schedule,
)
from stratagem.plan.simulation.spread import (
    Constant,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Spread,
    Stragglers,
)
from stratagem.rules.updates import Asynchronous, Drop, Ramp, ScaleDown, Synchronous, Updates
from stratagem.servers.training_plan import sends_at_once
from stratagem.wire.send_queue import LARGE
from stratagem.wire.simulated import Topology

RULES: list[Updates] = [
    Synchronous(),
    Synchronous(spares=1),
    Synchronous(spares=2, requeue=False),
    Asynchronous(),
    Asynchronous(bound=1),
    Asynchronous(buffer=3),
    Asynchronous(staleness=[Drop(older_than=2)]),
    Asynchronous(staleness=[ScaleDown(), Drop(older_than=3)], requeue=False, bound=2, buffer=2),
    Asynchronous(warmup=Ramp(steps=6)),
]
FREE = Topology(float("inf"))


def scenario(**given: object) -> Scenario:
    usual: dict[str, object] = {
        "workers": 4,
        "steps": 20,
        "work": Work(Constant(0.1), push=1e6),
        "topology": Topology(1e8),
    }
    return Scenario(**{**usual, **given})  # type: ignore[arg-type]


def balanced(run: SimulatedRun) -> bool:
    books = run.stats
    return books.received == books.applied + books.dropped + books.buffered


# --- how long it takes ------------------------------------------------------------------------


def test_one_worker_without_bytes_only_computes() -> None:
    run = simulate(scenario(workers=1, topology=FREE))
    assert run.seconds == pytest.approx(20 * 0.1)


def test_one_server_sends_to_one_after_the_other() -> None:
    # 4 workers x 1 MB out of one cable of 100 MB/s: 0.04 s, and the last pushes alone
    run = simulate(scenario())
    assert run.seconds == pytest.approx(20 * (0.04 + 0.1 + 0.01))


def test_two_servers_halve_it() -> None:
    # two workers at a time, whose own cables take as long
    run = simulate(scenario(servers=2))
    assert run.seconds == pytest.approx(20 * (0.02 + 0.1 + 0.01))


def test_the_largest_shard_is_the_bottleneck() -> None:
    run = simulate(scenario(servers=2, shards=(3.0, 1.0)))
    assert run.seconds == pytest.approx(20 * (0.03 + 0.1 + 0.015))


def test_asynchronous_workers_keep_out_of_each_others_way() -> None:
    """Workers settle into an order in which a server's link is full, or no worker waits."""
    for workers in (2, 5, 12, 20):
        run = simulate(scenario(workers=workers, steps=workers * 60, updates=Asynchronous()))
        alone = 0.01 + 0.1 + 0.01
        assert run.rate == pytest.approx(min(workers / alone, 100.0), rel=0.05)


def test_what_leaves_during_backward_costs_nothing_if_it_is_through_in_time() -> None:
    work = Work(Constant(0.1), push=1e6, pull=0.0, buckets=((0.9, 0.5), (0.1, 1.0)))
    run = simulate(scenario(work=work))
    assert run.seconds == pytest.approx(20 * (0.1 + 0.004))


def test_the_server_is_one_processor() -> None:
    work = Work(Constant(0.1), update=0.05)
    run = simulate(scenario(work=work, updates=Asynchronous(), steps=400, topology=FREE))
    assert run.rate == pytest.approx(20.0, rel=0.03), "4 workers would make 40 a second"
    halves = simulate(
        scenario(work=work, updates=Asynchronous(), steps=400, topology=FREE, servers=2)
    )
    assert halves.rate == pytest.approx(32.0, rel=0.03), "4 / (0.1 + 0.025)"


def test_latency_of_a_step() -> None:
    # ask, pull, push, and the answer before the next
    run = simulate(scenario(workers=1, work=Work(Constant(0.1)), topology=Topology(1e9, 0.01)))
    assert run.seconds == pytest.approx(20 * (0.1 + 4 * 0.01) - 0.01)


def test_the_slowest_of_all_or_all_but_the_spares() -> None:
    """Against the closed form of the k-th of n: shifted exponentials, D + (H_n - H_{n-k}) / lam."""
    spread = ShiftedExponential(least=0.1, average=0.2)
    work = Work(spread)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, 9))])
    for spares in (0, 1, 3):
        run = simulate(
            scenario(
                workers=8,
                steps=1000,
                work=work,
                topology=FREE,
                updates=Synchronous(spares=spares),
                servers=1,
            )
        )
        expected = 0.1 + (harmonic[8] - harmonic[spares]) * 0.1
        assert run.seconds / 1000 == pytest.approx(expected, rel=0.03)


@given(st.integers(1, 6), st.integers(1, 3), st.floats(1e5, 1e7), st.floats(1e6, 1e9))
@settings(max_examples=40, deadline=None)
def test_more_bytes_take_longer_and_more_bandwidth_less(
    workers: int, servers: int, size: float, rate: float
) -> None:
    def seconds(size: float, rate: float) -> float:
        return simulate(
            scenario(
                workers=workers,
                servers=servers,
                steps=5,
                work=Work(Constant(0.05), push=size),
                topology=Topology(rate, 1e-4),
            )
        ).seconds

    usual = seconds(size, rate)
    assert seconds(size * 2, rate) > usual > seconds(size, rate * 2)
    own = size / rate
    all_of_them = max(own, workers * own / servers)
    assert usual >= 5 * (all_of_them + 0.05 + own) * (1 - 1e-9)  # the last fetches, and pushes
    assert usual <= 5 * (1.15 * 2 * all_of_them + 0.05 + 4e-4)  # no slower than all at once


def test_a_slow_worker_sets_the_pace_unless_it_is_spare() -> None:
    slow = {2: 10.0}
    all_of = simulate(scenario(slow=slow, topology=FREE))
    spared = simulate(scenario(slow=slow, topology=FREE, updates=Synchronous(spares=1)))
    assert all_of.seconds == pytest.approx(20 * 1.0)
    assert spared.seconds == pytest.approx(20 * 0.1)


def test_who_cannot_stop_comes_to_every_step_too_late() -> None:
    given = scenario(
        workers=8,
        steps=300,
        topology=FREE,
        updates=Synchronous(spares=1),
        work=Work(Stragglers(Constant(0.1), 0.02, 10.0)),
    )
    stops, cannot = simulate(given), simulate(replace(given, cancels=False))
    assert stops.seconds < cannot.seconds
    assert stops.stats.abandoned > 0 == cannot.stats.abandoned


# --- what messages cost processors --------------------------------------------------------------


def a_step(costs: Overhead, updates: Updates, **given: object) -> float:
    """Seconds of the last of some steps; in the first, workers ask for a ticket under any rule."""
    times = simulate(scenario(topology=FREE, overhead=costs, updates=updates, **given)).updates
    return times[-1] - times[-2]


def test_an_asynchronous_worker_sends_one_message_to_one_server() -> None:
    costs = Overhead(0.01, 0.02, 1e-8, 2e-8, 0.003, 0.004)
    # a message, the loop and 2 MB of the worker's; the same of the server's
    expected = 0.1 + (0.01 + 0.003 + 0.02) + (0.02 + 0.004 + 0.04)
    assert a_step(costs, Asynchronous(), workers=1) == pytest.approx(expected)


def test_a_synchronous_one_asks_for_its_ticket_besides() -> None:
    more = a_step(Overhead(0.01, 0.02), Synchronous(), workers=1)
    assert more == pytest.approx(0.1 + 2 * 0.01 + 2 * 0.02)


def test_each_further_server_takes_two_messages_and_hears_an_order() -> None:
    worker = a_step(Overhead(worker_message=0.01), Asynchronous(), workers=1, servers=3)
    assert worker == pytest.approx(0.1 + 5 * 0.01)
    # at the lead: a message, and two orders of half a one; at each other: two, and an order
    server = a_step(Overhead(server_message=0.02), Asynchronous(), workers=1, servers=3)
    assert server == pytest.approx(0.1 + 2.5 * 0.02)
    coordinator = a_step(Overhead(server_message=0.02), Asynchronous(), workers=1, servers=9)
    assert coordinator == pytest.approx(0.1 + (1 + 8 / 2) * 0.02), "the lead's orders take longest"


def test_messages_fill_a_server() -> None:
    costs = Overhead(server_message=0.03, server_step=0.02)
    given = scenario(workers=8, steps=400, updates=Asynchronous(), topology=FREE, overhead=costs)
    assert simulate(given).rate == pytest.approx(1 / 0.05, rel=0.03)
    together = a_step(costs, Synchronous(), workers=8)
    assert together == pytest.approx(8 * 0.03 + 8 * 0.05), "computing hides behind the others"


def test_an_update_is_made_when_the_server_has_got_to_it() -> None:
    costs = Overhead(server_message=0.02)
    for updates in (Synchronous(), Asynchronous()):
        run = simulate(
            scenario(
                workers=1,
                work=Work(Constant(0.1), update=0.05),
                topology=FREE,
                updates=updates,
                overhead=costs,
            )
        )
        assert run.updates[0] == pytest.approx(0.02 + 0.1 + 0.02 + 0.05)


def test_buckets_leave_before_the_loop_around_is_through() -> None:
    work = Work(Constant(0.1), push=1e6, pull=0.0, buckets=((0.9, 0.5), (0.1, 1.0)))
    run = simulate(scenario(work=work, overhead=Overhead(worker_step=0.05)))
    assert run.seconds == pytest.approx(20 * (0.1 + 0.05 + 0.004))


# --- the same again -----------------------------------------------------------------------------


@pytest.mark.parametrize("updates", RULES, ids=str)
def test_the_same_seed_gives_the_same_trace(updates: Updates) -> None:
    def run(seed: int) -> SimulatedRun:
        faults = schedule(seed, 4, 3.0, 4)
        return simulate(
            scenario(
                updates=updates,
                work=Work(Lognormal(0.1, 0.5), 1e6),
                seed=seed,
                faults=faults,
                patience=0.5,
            ),
            trace=True,
        )

    assert run(1).digest == run(1).digest != run(2).digest


# --- bad days -----------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", RULES, ids=str)
def test_books_balance_on_any_bad_day(updates: Updates) -> None:
    """Random schedules of kills, returns, stalls and cuts, each from a seed."""
    for seed in range(84):  # every number of workers, of faults and of workers a host
        workers = 3 + seed % 4
        given = scenario(
            workers=workers,
            steps=12,
            seed=seed,
            updates=updates,
            servers=1 + seed % 2,
            work=Work(Lognormal(0.1, 0.5), push=1e6, buckets=((0.5, 0.5), (0.5, 1.0))),
            topology=Topology(1e8, 1e-3, per_host=1 + seed % 3 // 2),
            patience=0.5,
            faults=schedule(seed, workers, 2.0, seed % 7),
            cancels=bool(seed % 5),
        )
        run = simulate(given, trace=True)
        books = run.stats
        assert balanced(run) and not run.failure, f"seed {seed}"
        # everything dealt was applied once or, where the rule may lose it, counted as lost
        tickets = 12 * (
            max(1, workers - getattr(updates, "spares", 0))
            if isinstance(updates, Synchronous)
            else 1
        )
        assert books.applied + books.lost == tickets, f"seed {seed}"
        assert not (books.lost and updates.requeue), f"seed {seed}"
        kept = [numbers[0] for _, what, _, numbers in run.trace if what == "push" and numbers[2]]
        assert len(set(kept)) == len(kept), f"seed {seed}: a ticket counted twice"
        assert list(run.updates) == sorted(run.updates)


def test_a_killed_worker_is_not_waited_for() -> None:
    run = simulate(scenario(topology=FREE, faults=(Kill(3, 0.55),)))
    # the part in its hands is done by another, at the same version, and from then on there are
    # four parts for three workers
    assert not run.failure and run.stats.applied == 80
    assert run.seconds == pytest.approx(0.5 + 0.2 * 15)


def test_another_takes_its_place() -> None:
    run = simulate(scenario(topology=FREE, faults=(Kill(3, 0.55, back=0.5),)), trace=True)
    assert run.stats.applied == 80 and run.seconds < 0.5 + 0.2 * 15
    assert [what for _, what, worker, _ in run.trace if worker == 3].count("join") == 2


def test_a_stalled_worker_is_waited_for_until_patience_ends() -> None:
    stalled = (Stall(1, 0.55, 3.0),)
    waited = simulate(scenario(topology=FREE, faults=stalled))
    assert waited.seconds == pytest.approx(2.0 + 3.0, abs=0.1)
    given_up = simulate(scenario(topology=FREE, faults=stalled, patience=1.0))
    assert given_up.seconds < waited.seconds and given_up.stats.applied == 80
    spared = simulate(scenario(topology=FREE, faults=stalled, updates=Synchronous(spares=1)))
    assert spared.seconds == pytest.approx(2.0, abs=0.05)


def test_a_cut_holds_up_what_has_to_pass_it() -> None:
    run = simulate(scenario(faults=(Cut(1, 0.01, 1.0),)))
    assert run.seconds == pytest.approx(20 * 0.15 + 1.0, abs=0.1)


@pytest.mark.parametrize("updates", RULES, ids=str)
def test_a_cut_after_the_end_changes_nothing(updates: Updates) -> None:
    given = scenario(updates=updates, work=Work(Lognormal(0.1, 0.5), push=1e6), servers=2)
    cut = simulate(replace(given, faults=(Cut(1, 1e6, 1.0),)))
    assert cut.updates == pytest.approx(simulate(given).updates)


def test_who_is_cut_off_in_its_turn_is_overtaken() -> None:
    """Worker 0 has the first turn; the other workers wait for it a quarter of a second, not ten."""
    given = scenario(updates=Asynchronous(), faults=(Cut(0, 0.005, 10.0),))
    run = simulate(given, trace=True)
    first = {worker: at for at, what, worker, _ in reversed(run.trace) if what == "push"}
    assert [first[w] for w in (1, 2, 3)] == pytest.approx([0.375, 0.385, 0.395], abs=0.01)


def test_two_cuts_of_one_host_last_until_the_second_ends() -> None:
    run = simulate(scenario(faults=(Cut(1, 0.01, 1.0), Cut(1, 0.5, 2.0))))
    assert run.seconds == pytest.approx(20 * 0.15 + 2.5, abs=0.1)


def test_a_dead_server_ends_the_job() -> None:
    run = simulate(scenario(faults=(ServerDeath(0, 1.0),)))
    assert "ps 0" in run.failure and run.seconds == 1.0 and balanced(run)


def test_nobody_left() -> None:
    run = simulate(scenario(workers=2, faults=(Kill(0, 0.5), Kill(1, 0.7))))
    assert run.failure == "nobody is left to do the work" and balanced(run)


# --- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"steps": 0},
        {"servers": -1},
        {"servers": 0, "updates": Asynchronous()},
        {"servers": 2, "shards": (1.0,)},
        {"faults": (Kill(9, 1.0),)},
        {"faults": (Stall(0, -1, 1),)},
        {"faults": (ServerDeath(1, 1.0),)},
        {"servers": 0, "overhead": Overhead(0.1)},
        {"faults": (Kill(0, math.nan),)},
        {"faults": (Kill(0, 1.0, math.inf),)},
        {"faults": (Stall(0, 1.0, math.inf),)},
        {"faults": (Cut(0, math.inf, 1.0),)},
        {"slow": {0: math.inf}},
        {"shards": (math.nan,)},
        {"patience": math.nan},
    ],
    ids=str,
)
def test_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        scenario(**wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(math.inf),
        lambda: Constant(math.nan),
        lambda: Lognormal(math.inf, 1.0),
        lambda: Lognormal(1.0, math.inf),
        lambda: Lognormal(1.0, 1e3),
        lambda: Pareto(1.0, 1e-3),
        lambda: ShiftedExponential(0.0, math.inf),
        lambda: Pareto(math.inf, 2.0),
        lambda: Stragglers(Constant(1.0), 0.5, math.inf),
    ],
)
def test_steps_that_would_never_end(make: Callable[[], Spread]) -> None:
    with pytest.raises(UsageError, match="needs"):
        make()


def test_overhead_that_cannot_be() -> None:
    with pytest.raises(UsageError):
        Overhead(server_byte=-1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"push": -1.0},
        {"update": float("nan")},
        {"buckets": ((0.5, 1.0),)},
        {"buckets": ((1.0, 1.5),)},
    ],
    ids=str,
)
def test_work_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Work(Constant(0.1), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_small_values_go_to_all_who_ask_at_once(workers: int) -> None:
    """As from real servers; a byte more or less decides whether workers push at once, too."""

    def seconds(size: float) -> float:
        work = Work(Constant(1.0), push=size)
        given = scenario(workers=workers, steps=1, work=work, topology=Topology(LARGE))
        return simulate(given).seconds

    assert seconds(LARGE) == pytest.approx(workers + 1 + 1)
    assert seconds(LARGE - 1.0) == pytest.approx(workers + 1 + workers, rel=1e-4)


@given(st.integers(1, 200), st.integers(1, 40))
def test_values_go_to_groups_that_fill_the_servers_lines(workers: int, servers: int) -> None:
    together = sends_at_once(workers, servers, in_step=True)
    assert min(workers, servers) <= together <= workers
    groups = math.ceil(workers / together)
    assert groups <= max(1, workers // servers)  # as many as can be, with a line's worth each
    assert sends_at_once(workers, servers, in_step=False) == servers
