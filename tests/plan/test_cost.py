"""Invariants of a step's cost for every model, machine and configuration."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.plan.configuration import CENTRAL, MIRRORED, MULTI_WORKER, SERVERS, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.formulas import (
    largest_share,
    overlapped,
    ring,
)
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import GradientPart, Profile, SparseTable
from tests.plan.support import IDEAL, configurations, machines, profile, profiles


@given(profiles(), machines())
def test_one_replica_talks_to_nobody(model: Profile, machine: Hardware) -> None:
    for kind in (MIRRORED, MULTI_WORKER, CENTRAL):
        said = predict(model, machine, Configuration(kind))
        assert isclose(said.step, model.compute + model.optimizer) and isclose(said.speedup, 1.0)
        assert set(said.parts) == {"compute", "optimizer"}


@given(profiles(), machines(), configurations(), st.floats(1.1, 100.0))
def test_time_falls_with_bandwidth(
    model: Profile, machine: Hardware, cfg: Configuration, more: float
) -> None:
    fast = replace(machine, link=machine.link * more)
    assert predict(model, fast, cfg).step <= predict(model, machine, cfg).step * (1 + 1e-9)


@pytest.mark.parametrize(("cores", "threads", "late"), [(1, 1, 4e-3), (2, 1, 0.0), (4, 4, 1e-3)])
def test_cores_that_carry_gradients_compute_less(cores: int, threads: int, late: float) -> None:
    """If no core is idle, while a bucket is sent before the end of backward."""
    model, hosts = profile(threads=threads), Configuration(MULTI_WORKER, 2)
    machine = Hardware(hosts=2, link=1e12, latency=0.0, local=1e12, cores=cores)
    unknown = predict(model, machine, hosts, IDEAL).step
    known = predict(model, replace(machine, sockets=1e9), hosts, IDEAL).step
    assert known - unknown == pytest.approx(late)  # 4 MB
    slow = replace(machine, link=1e6)  # the link is still at it when backward has ended
    first = predict(model, slow, hosts, IDEAL).step
    assert predict(model, replace(slow, sockets=1e9), hosts, IDEAL).step == pytest.approx(first)


@given(profiles(), machines(), configurations(), st.integers(2, 10))
def test_time_grows_with_bytes(
    model: Profile, machine: Hardware, cfg: Configuration, more: int
) -> None:
    large = replace(
        model,
        buckets=tuple(GradientPart(b.size * more, b.ready) for b in model.buckets),
        shapes=tuple((rows * more, *rest) for rows, *rest in model.shapes),
        optimizer=model.optimizer * more,
    )
    # What a server holds is cut at whole rows, so a larger model may be cut a little more evenly.
    assert predict(large, machine, cfg).step >= predict(model, machine, cfg).step * 0.999


@given(profiles(), machines(), configurations())
def test_a_step_is_no_shorter_than_any_part_of_it(
    model: Profile, machine: Hardware, cfg: Configuration
) -> None:
    said = predict(model, machine, cfg)
    assert said.step >= model.compute * (1 - 1e-9)
    assert isclose(said.step, sum(said.parts.values()), rel_tol=1e-9)
    assert all(part >= 0 for part in said.parts.values())
    assert said.limit in said.parts
    if cfg.strategy == MULTI_WORKER and not cfg.hierarchical and cfg.replicas > 1:
        size = model.dense_bytes * cfg.travelling
        assert said.step >= ring(size, cfg.replicas, machine.latency, machine.link) * (1 - 1e-9)


@given(profiles(), machines(), configurations())
def test_speed_is_examples_over_time(model: Profile, machine: Hardware, cfg: Configuration) -> None:
    said = predict(model, machine, cfg)
    assert isclose(said.rate * said.step, cfg.counted * model.batch)
    assert isclose(said.speedup, said.rate * (model.compute + model.optimizer) / model.batch)
    assert isclose(said.efficiency * cfg.replicas, said.speedup)


def test_ring_by_hand() -> None:
    assert ring(8e6, 4, 1e-3, 1e8) == pytest.approx(6e-3 + 2 * 3 / 4 * 0.08)
    assert ring(8e6, 1, 1e-3, 1e8) == 0.0


def test_overlap_by_hand() -> None:
    """The second bucket waits for the first, the third for backward."""
    parts = [(2.0, 1.0), (1.0, 2.0), (1.0, 9.0)]
    assert overlapped(parts, lambda size: size) == 10.0
    assert overlapped(parts, lambda size: 4 * size) == max(1 + 8, 2) + 4 + 4


def test_a_ring_hides_behind_backward() -> None:
    """The first bucket is done before backward ends, so only the last one counts."""
    machine = Hardware(hosts=2, link=1e9, latency=0.0)
    said = predict(profile(), machine, Configuration(MULTI_WORKER, 2), IDEAL)
    assert said.step == pytest.approx(0.03 + 4e6 / 1e9 + 0.001)


def test_servers_bind_beyond_the_knee() -> None:
    model = profile(shapes=((2_000_000,),))
    machine = Hardware(hosts=64, link=1e9, latency=0.0, update=1e15)
    at = model.compute * machine.link / (2 * model.dense_bytes)
    few = predict(model, machine, Configuration(SERVERS, 2, servers=1), IDEAL)
    many = predict(model, machine, Configuration(SERVERS, int(4 * at), servers=1), IDEAL)
    assert few.limit == "compute" and "a server's link" in many.limit


def test_the_fullest_server_counts() -> None:
    assert largest_share(((1000, 1000),), 4, 2) == 0.5
    assert largest_share(((3,), (1,)), 4, 2) == 0.75  # too small to be cut


def test_more_servers_carry_more() -> None:
    machine = Hardware(hosts=16, link=1.25e8)
    steps = [
        predict(profile(), machine, Configuration(SERVERS, 16, servers=k)).step for k in (1, 2, 4)
    ]
    assert steps[0] > 1.5 * steps[1] > 1.5 * steps[2]


def test_small_values_go_to_all_at_once() -> None:
    """So all workers push at once, too; values sent in turn would stagger them."""
    machine = Hardware(hosts=8, link=1.25e6, latency=0.0, update=1e15)
    steps = {}
    for rows in (32, 128):  # 128 kB and 512 kB
        model = profile(
            forward=0.0,
            backward=0.0,
            optimizer=0.0,
            shapes=((rows, 1000),),
            buckets=(GradientPart(rows * 4000, 0.0),),
        )
        step = predict(model, machine, Configuration(SERVERS, 8, servers=1), IDEAL).step
        steps[rows] = step / (rows * 4000 / machine.link)
    assert steps[32] == pytest.approx(8 + 8)
    assert steps[128] == pytest.approx(8 + 1 + 7 * (1 - IDEAL.turns))


def test_sixteen_bits_halve_the_way() -> None:
    machine = Hardware(hosts=4, link=1.25e6, latency=0.0)
    plain, half = (
        predict(profile(), machine, Configuration(MULTI_WORKER, 4, wire=wire), IDEAL).step
        for wire in (None, "bfloat16")
    )
    assert plain / half == pytest.approx(2.0, rel=0.02)


def test_spares_do_not_wait_for_the_last() -> None:
    model = profile(samples=(1.0,) * 19 + (10.0,))
    machine = Hardware(hosts=16, link=1e11)
    all_, spared = (
        predict(model, machine, Configuration(SERVERS, 16, servers=4, spares=b)) for b in (0, 2)
    )
    assert all_.limit == "stragglers" and spared.rate > 1.3 * all_.rate


def test_asynchronous_workers_do_not_wait_but_a_server_fills_up() -> None:
    model = profile(samples=(1.0,) * 19 + (10.0,))
    machine = Hardware(hosts=1024, link=1e10, latency=0.0, update=1e12)
    rates = [
        predict(model, machine, Configuration(SERVERS, n, servers=1, asynchronous=True), IDEAL).rate
        for n in (2, 4, 512, 1024)
    ]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.05)
    assert rates[3] == pytest.approx(rates[2], rel=0.02)


def test_sparse_rows_travel_instead_of_tables() -> None:
    model = profile(sparse=(SparseTable(1_000_000, 256, 64.0),))
    assert model.sparse_bytes == pytest.approx(64 * 264)
    assert model.travels(10) - model.dense_bytes == pytest.approx(640 * 264, rel=1e-3)
    machine = Hardware(hosts=4)
    table = GradientPart(256_000_000, 0.02)
    dense = profile(buckets=(*profile().buckets, table), shapes=((1_000_000, 64), (2_000_000,)))
    rows, all_ = (
        predict(each, machine, Configuration(SERVERS, 4, servers=1)).step for each in (model, dense)
    )
    assert rows < all_ / 10
    for cfg in (Configuration(MULTI_WORKER, 4), Configuration(CENTRAL, per_host=2)):
        with pytest.raises(UsageError, match="sparse gradients"):
            predict(model, machine, cfg)


def test_measured_crowds_are_believed() -> None:
    model = profile(crowd=((2, 0.04), (8, 0.10)))
    machine = Hardware(per_host=8, cores=8)
    for n, compute in ((2, 0.04), (4, 0.06), (8, 0.10)):
        said = predict(model, machine, Configuration(per_host=n))
        assert said.parts["compute"] == pytest.approx(compute)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "Nonsense"}, "is none of"),
        ({"hosts": 0}, "there must be a replica"),
        ({"wire": "float8"}, "float8"),
        ({"strategy": SERVERS}, "needs a server"),
        ({"strategy": SERVERS, "servers": 1, "hosts": 2, "spares": 2}, "leave nobody"),
        ({"per_host": 4, "spares": 1}, "waits for all"),
        ({"hosts": 2}, "is of one host"),
    ],
)
def test_impossible_configurations(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Configuration(**settings)  # type: ignore[arg-type]


def test_replicas_with_as_many_threads_each_take_the_same() -> None:
    """On 16 cores 12 replicas have one core each, as 16 replicas do; 6 have two, as 8 do."""
    from stratagem.plan.formulas import between

    known = {1: 0.1, 2: 0.03, 8: 0.09, 16: 0.17}
    assert between(12, known, 16) == 0.17 and between(6, known, 16) == 0.09
    assert 0.03 < between(3, known, 16) < between(4, known, 16) < 0.09
    assert between(32, known, 16) == 2 * 0.17, "they take turns"
    assert between(4, {1: 0.1, 2: 0.1}, 2) == 0.2


def test_what_each_micro_batch_sends_counts() -> None:
    """Rings all-reduce every micro-batch; servers get the gradient once a step."""
    machine = Hardware(hosts=4, link=1.25e8, latency=0.0)
    ring_, served = Configuration(MULTI_WORKER, 4), Configuration(SERVERS, 4, 1, 1)
    for cfg, times in ((ring_, 4), (served, 1)):
        once = predict(profile(), machine, cfg, IDEAL)
        often = predict(profile(accumulated=4), machine, cfg, IDEAL)
        alone = once.parts["compute"] + once.parts.get("optimizer", 0.0)
        assert often.step - alone == pytest.approx(times * (once.step - alone))
