"""The recommendation follows from the predictions: strategy, number of replicas, saturation."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.errors import UsageError
from stratagem.plan import advice
from stratagem.plan.choose import WORTH, candidates, choose, sizes
from stratagem.plan.configuration import CENTRAL, MIRRORED, MULTI_WORKER, SERVERS
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import GradientPart, Profile, SparseTable
from stratagem.plan.report import text
from tests.plan.support import machines, profile, profiles

GPUS = {"device": "cuda"}


def test_sizes_double_and_end_where_asked() -> None:
    assert sizes(1) == [1] and sizes(8) == [1, 2, 4, 8] and sizes(12) == [1, 2, 4, 8, 12]


def test_every_strategy_is_tried() -> None:
    found = list(candidates(profile(), Hardware(hosts=4, per_host=2), 8))
    assert {each.strategy for each in found} == {MIRRORED, MULTI_WORKER, CENTRAL, SERVERS}
    assert any(each.spares for each in found) and any(each.asynchronous for each in found)
    assert {each.servers for each in found} == {0, 1, 2}  # of four hosts two must compute
    assert all(c.hosts + c.servers <= 4 for c in found if c.strategy == SERVERS and c.hosts > 1)
    assert max(c.replicas for c in found if c.servers == 1 and c.hosts > 1) == 6
    assert len(found) == len(set(found))
    shapes = {(c.hosts, c.per_host) for c in found if c.replicas == 8}
    assert shapes == {(4, 2)}
    assert {(c.hosts, c.per_host) for c in found if c.replicas == 4} == {(2, 2), (4, 1)}


def test_sparse_models_go_to_servers() -> None:
    model = profile(sparse=(SparseTable(1000, 64, 10.0),))
    found = list(candidates(model, Hardware(hosts=4), 4))
    assert {each.strategy for each in found if each.replicas > 1} <= {CENTRAL, SERVERS}
    assert choose(model, Hardware(hosts=4)).recommendation.configuration.strategy == SERVERS


@pytest.mark.parametrize("machine", [Hardware(), Hardware(hosts=2), Hardware(hosts=8)])
def test_sparse_models_on_one_device(machine: Hardware) -> None:
    """If there is no host for a server, or if one device is all that is planned for."""
    model = profile(sparse=(SparseTable(1000, 64, 10.0),))
    plan = choose(model, machine, most=1 if machine.hosts == 8 else None)
    assert plan.recommendation.configuration.replicas == 1
    assert "Stay on one device" in text(plan) and "Mirrored" in text(plan)


@settings(max_examples=20)
@given(profiles(), machines(), st.integers(1, 32))
def test_the_recommendation_is_never_a_loss(model: Profile, machine: Hardware, most: int) -> None:
    plan = choose(model, machine, most=most)
    best = plan.recommendation
    assert best.speedup >= 0.95 and best.configuration.replicas <= max(most, 1)
    assert advice.sentence(plan).startswith(("Take ", "Stay on one device"))
    ast.parse(advice.code(plan))
    in_step = [p.rate for p in plan.predictions if not p.configuration.asynchronous]
    if best.configuration.asynchronous:
        assert best.rate > 0.95 * 1.1 * max(in_step, default=0.0)


def test_fast_links_use_everything_and_slow_ones_stay_at_home() -> None:
    model = profile(**GPUS)
    fast = choose(model, Hardware(hosts=8, per_host=1, link=1e11, latency=1e-6, update=1e12))
    assert fast.recommendation.configuration.replicas == 8
    assert fast.recommendation.efficiency > 0.8
    slow = choose(model, Hardware(hosts=8, per_host=1, link=1e6, latency=1e-2))
    assert slow.recommendation.configuration.replicas == 1
    assert "Stay on one device" in advice.sentence(slow)


def test_saturation_names_the_link() -> None:
    model = profile(**GPUS, buckets=(GradientPart(40_000_000, 0.02),), shapes=((10_000_000,),))
    plan = choose(model, Hardware(hosts=32, link=1.25e8, latency=1e-3))
    at = plan.saturations["ParameterServer, 1 server"]
    row = plan.families["ParameterServer, 1 server"]
    assert at.reached and "a server's link (1Gbit)" in at.reason
    after = next(p for p in row if p.configuration.replicas > at.replicas)
    here = next((p for p in row if p.configuration.replicas == at.replicas), plan.one)
    gained = (after.speedup - here.speedup) / (
        after.configuration.replicas - here.configuration.replicas
    )
    assert gained < WORTH


def test_worth_it_is_measured_against_one_device() -> None:
    """Two replicas are slower than one device, so speedups are not relative to two replicas."""
    model = profile(**GPUS, buckets=(GradientPart(40_000_000, 0.02),), shapes=((10_000_000,),))
    for link in (2e7, 4e7, 6e7, 1e8, 2e8, 4e8):
        plan = choose(model, Hardware(hosts=16, link=link))
        best = plan.recommendation
        machines = best.configuration.replicas + best.configuration.servers
        assert best.speedup - 1 >= WORTH * (machines - 1)
        for name, at in plan.saturations.items():
            row = {p.configuration.replicas: p for p in plan.families[name]}
            assert at.replicas == 1 or row[at.replicas].speedup > 1


def ranker(compute: float, rows: float) -> Profile:
    """A small model over a large table."""
    return profile(
        forward=compute / 2,
        backward=compute / 2,
        optimizer=compute / 5,
        buckets=(GradientPart(2600, compute / 2),),
        shapes=((64, 10), (10,)),
        sparse=(SparseTable(100_000, 256, rows),),
        samples=(compute,) * 50,
    )


@pytest.mark.parametrize(("compute", "rows"), [(9e-4, 300.0), (1.4e-3, 1000.0)])
def test_servers_are_machines_that_must_pay(compute: float, rows: float) -> None:
    """Three workers and a server that add a tenth are not worth having, and the plan says so."""
    plan = choose(ranker(compute, rows), Hardware(hosts=4))
    assert plan.recommendation.configuration.replicas == 1


def test_a_refusal_has_its_true_reason() -> None:
    """Asynchronous updates that are faster, but not by enough."""
    plan = choose(ranker(1.4e-3, 1000.0), Hardware(hosts=4))
    top = max(p.speedup for p in plan.worth)
    assert plan.recommendation.configuration.replicas == 1 and 1.1 < top < 1.4
    said = advice.sentence(plan)
    assert "nothing in step" in said and f"take in {top:.1f}x" in said and "from 1.4x on" in said


def test_hosts_are_counted_not_replicas() -> None:
    """Eight hosts of one device that add a percent to four hosts of two are not worth having."""
    model = profile(forward=0.2, backward=0.3, crowd=((2, 0.505),))
    plan = choose(model, Hardware(hosts=8, per_host=2, cores=2), most=8)
    assert (
        plan.recommendation.configuration.hosts,
        plan.recommendation.configuration.per_host,
    ) == (4, 2)
    assert plan.placements(plan.recommendation.configuration)[0].configuration.hosts == 8


def test_the_end_of_a_row_is_not_the_end_of_the_plan() -> None:
    model = profile(**GPUS, buckets=(GradientPart(100_000_000, 0.02),), shapes=((25_000_000,),))
    plan = choose(model, Hardware(hosts=8, per_host=4, link=1.25e8, local=5e10, cores=16))
    assert "up to 4, all of one host, each more still pays" in advice.sentence(plan)
    assert "all 4" in text(plan) and "and more" not in text(plan)


def test_placement_is_told() -> None:
    """Replicas of one host share its link to the servers, but share memory in an all-reduce."""
    model = profile(**GPUS, buckets=(GradientPart(80_000_000, 0.02),), shapes=((20_000, 1000),))
    plan = choose(model, Hardware(hosts=4, per_host=4, link=1.25e9, local=1e11), most=4)
    assert plan.recommendation.configuration.hosts == 1
    both = choose(model, Hardware(hosts=8, per_host=8, link=1.25e10, local=3e11), most=16)
    others = both.placements(both.recommendation.configuration)
    assert {(p.configuration.hosts, p.configuration.per_host) for p in others} >= {(2, 8), (4, 4)}
    assert others == sorted(others, key=lambda p: -p.rate)


def test_asynchronous_is_no_equal() -> None:
    """Asynchronous updates are recommended only if they are much faster, and with a warning."""
    ragged = profile(samples=(1.0,) * 90 + (30.0,) * 10, **GPUS)
    plan = choose(ragged, Hardware(hosts=16, link=1e11, update=1e13))
    assert plan.recommendation.configuration.asynchronous
    assert "not the equals" in advice.sentence(plan) and "LowerRate" in advice.sentence(plan)
    even = choose(profile(**GPUS), Hardware(hosts=16, link=1e11, update=1e13))
    assert not even.recommendation.configuration.asynchronous


def test_of_equals_the_simple_one() -> None:
    best = choose(profile(), Hardware(hosts=1, per_host=4, cores=4)).recommendation
    assert best.configuration.strategy == MIRRORED


@pytest.mark.parametrize(
    "machine",
    [
        Hardware(per_host=2, cores=2),
        Hardware(hosts=4, link=1e11),
        Hardware(hosts=4, link=1e8),
        Hardware(hosts=2, per_host=8, link=1e9),
    ],
)
def test_code_names_what_exists(machine: Hardware) -> None:
    for model in (profile(), profile(**GPUS), profile(samples=(1.0,) * 9 + (30.0,))):
        plan = choose(model, machine)
        for node in ast.walk(ast.parse(advice.code(plan).replace("...", "x"))):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "sg":
                assert hasattr(sg, node.attr)


@pytest.mark.parametrize("most", [0, -1])
def test_no_replicas_is_one_sentence(most: int) -> None:
    with pytest.raises(UsageError, match="must be 1 or more"):
        choose(profile(), Hardware(), most=most)


def test_more_replicas_than_hosts_means_more_hosts() -> None:
    assert choose(profile(), Hardware(hosts=2, per_host=4), most=64).hardware.hosts == 16


def test_no_servers_for_an_optimizer_that_they_refuse() -> None:
    hardware = Hardware(hosts=4, per_host=2)
    found = list(candidates(profile(unserved="it is not there"), hardware, 8))
    assert found and not any(each.servers or each.asynchronous for each in found)
    assert any(each.servers for each in candidates(profile(), hardware, 8))
