"""The recommendation says how many replicas, which strategy, and whether the link is enough."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import PropertyMock, patch

import pytest

import stratagem as sg
from stratagem.plan import advice
from stratagem.plan.choose import Plan, choose
from stratagem.plan.configuration import CENTRAL, MIRRORED, MULTI_WORKER, SERVERS, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import GradientPart
from tests.plan.support import profile

LARGE = (GradientPart(400_000_000, 0.02),)


@pytest.mark.parametrize(
    ("link", "buckets", "said"),
    [
        (1.25e10, profile().buckets, "100Gbit is enough: a faster link would add"),
        (2.5e8, profile().buckets, "2Gbit holds it back: with 25Gbit it would be"),
        (1.25e6, LARGE, "10Mbit is too slow for more hosts: with 100Gbit, 4 of them"),
    ],
)
def test_is_the_link_enough(link: float, buckets: tuple[GradientPart, ...], said: str) -> None:
    model = profile(buckets=buckets, device="cuda", shapes=((10_000, 10_000),))
    plan = choose(model, Hardware(hosts=4, link=link))
    assert said in advice.sentence(plan)


def test_a_sold_link_is_named_only_if_it_is_faster_and_holds() -> None:
    """The sentence about the other link agrees with a plan for it."""
    plan = choose(profile(device="cuda"), Hardware(hosts=4, link=2.5e8))
    faster = replace(plan.hardware, link=3.125e9)
    then = predict(plan.profile, faster, plan.recommendation.configuration, plan.calibration)
    assert f"with 25Gbit it would be {then.speedup:.1f}x" in advice.sentence(plan)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("per_host", [1, 4])
def test_where_a_loop_of_ones_own_goes(own: bool, per_host: int) -> None:
    """A process with several devices runs a custom loop by strategy.run; `fit` needs no comment."""
    model = profile(device="cuda", own_loop=own)
    pasted = advice.code(choose(model, Hardware(hosts=2, per_host=per_host, link=1.25e10)))
    assert ("strategy.run(function)" in pasted) == (own and per_host > 1)
    assert ("for your DataLoader" if own else "for fit") in pasted


def test_one_host_has_no_link() -> None:
    assert "bit" not in advice.sentence(choose(profile(), Hardware(per_host=2, cores=2)))


def test_a_restless_machine_is_no_reason_to_be_asynchronous() -> None:
    restless = (1.0,) * 17 + (4.0,) * 3
    at = Hardware(hosts=8, link=1.25e10)
    small = {"buckets": (GradientPart(400_000, 0.02),), "shapes": ((100, 1000),)}
    free = choose(profile(samples=restless, device="cuda", **small), at)
    assert not free.recommendation.configuration.asynchronous
    assert "Asynchronous updates would take in" in advice.sentence(free)
    with patch("stratagem.plan.profile.Profile.restless", False):
        assert choose(free.profile, at).recommendation.configuration.asynchronous


def test_nor_to_have_spares() -> None:
    """The same steps on a busy machine; the sentence says what is in doubt."""
    noise = profile(samples=(1.0,) * 17 + (4.0,) * 3)
    at = Hardware(hosts=8, link=1e10, update=1e13)
    plan = choose(noise, at)
    even = choose(profile(samples=(1.0,) * 20), at)
    assert plan.recommendation.configuration == even.recommendation.configuration
    assert "cannot be told from other work" in advice.sentence(plan)
    assert "other work" not in advice.sentence(even)


def test_few_steps_are_as_good_as_none() -> None:
    assert profile(samples=(1.0,) * 9).restless
    assert profile(samples=(1.0,) * 199 + (4.0,)).restless  # once is no frequency
    assert not profile(samples=(1.0,) * 190 + (4.0,) * 10).restless
    assert not profile(samples=(1.0,) * 10).restless and not profile().restless


def test_nobody_is_faster_among_others_than_alone() -> None:
    """A replica that was measured faster had more of the machine to itself."""
    lucky = profile(crowd=((2, 0.02),))
    two = predict(lucky, Hardware(per_host=2, cores=2), Configuration(MIRRORED, per_host=2))
    assert two.efficiency <= 1 and two.parts["compute"] == lucky.compute


@pytest.mark.parametrize(
    "cfg",
    [
        Configuration(SERVERS, per_host=2, servers=1, asynchronous=True),
        Configuration(CENTRAL, per_host=2, asynchronous=True),
        Configuration(SERVERS, 2, 2, servers=1, asynchronous=True),
        Configuration(SERVERS, 2, 2, servers=2, asynchronous=True),
    ],
    ids=str,
)
def test_nor_are_asynchronous_workers(cfg: Configuration) -> None:
    """The slowest of two was measured; alone is the pace of those that meet nobody."""
    machine = Hardware(hosts=4, per_host=2, cores=2)
    for crowd in (0.03, 0.06):
        uneven = profile(crowd=((2, crowd),), samples=(1.0,) * 10 + (4.0,) * 10)
        compute = predict(uneven, machine, cfg).parts["compute"]
        assert uneven.compute <= compute <= crowd
    slow = predict(uneven, replace(machine, link=1e6, local=1e8), cfg).parts["compute"]
    assert slow < compute  # the other worker computes for less of the time


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "chosen",
    [
        Configuration(MIRRORED),
        Configuration(MIRRORED, per_host=2),
        Configuration(CENTRAL, per_host=2),
        Configuration(SERVERS, per_host=2, servers=1, asynchronous=True),
    ],
    ids=str,
)
def test_the_code_runs_as_printed(chosen: Configuration) -> None:
    """The code runs on one machine; a test of the command line also trains with it on a cluster."""
    plan = choose(profile(batch=3), Hardware(per_host=2, cores=2))
    best = predict(plan.profile, plan.hardware, chosen)
    with patch.object(Plan, "recommendation", new_callable=PropertyMock, return_value=best):
        text = advice.code(plan)
    pasted: dict[str, object] = {}
    exec(text, pasted)
    strategy = pasted["strategy"]
    assert isinstance(strategy, sg.Strategy)
    assert type(strategy).__name__ == chosen.strategy
    assert pasted["batch_size"] == 3 * (1 if chosen.asynchronous else chosen.replicas)
    if not chosen.asynchronous:
        assert strategy.num_replicas_in_sync == chosen.replicas


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (Configuration(MIRRORED), 'sg.MirroredStrategy(["cuda:0"])'),
        (Configuration(MIRRORED, per_host=2), 'sg.MirroredStrategy(["cuda:0", "cuda:1"])'),
        (Configuration(MULTI_WORKER, 2, 4), "sg.MultiWorkerMirroredStrategy()"),
        (Configuration(MULTI_WORKER, 2, 1), 'sg.MultiWorkerMirroredStrategy(devices=["cuda:0"])'),
        (
            Configuration(MULTI_WORKER, 2, 2, hierarchical=True),
            'sg.MultiWorkerMirroredStrategy("hierarchical", devices=["cuda:0", "cuda:1"])',
        ),
        (
            Configuration(SERVERS, per_host=2, servers=1),
            "sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous(),"
            ' devices=["cuda:0", "cuda:1"])',
        ),
        (
            Configuration(SERVERS, 2, servers=1),
            'sg.ParameterServerStrategy(updates=sg.Synchronous(), devices=["cuda:0"])',
        ),
    ],
    ids=str,
)
def test_fewer_gpus_than_a_host_has_are_named(chosen: Configuration, said: str) -> None:
    """A strategy without device names uses all GPUs."""
    plan = choose(profile(device="cuda"), Hardware(hosts=2, per_host=4))
    best = predict(plan.profile, plan.hardware, chosen)
    with patch.object(Plan, "recommendation", new_callable=PropertyMock, return_value=best):
        assert f"strategy = {said}\n" in advice.code(plan)
        named = f"Take {said.removeprefix('sg.').partition('(')[0]}"
        assert chosen.replicas == 1 or advice.sentence(plan).startswith(named)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (Configuration(MIRRORED), 'sg.MirroredStrategy(["cpu:0"])'),
        (Configuration(MULTI_WORKER, 2), 'sg.MultiWorkerMirroredStrategy(devices=["cpu:0"])'),
        (
            Configuration(SERVERS, per_host=2, servers=1),
            "sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous(),"
            ' devices="cpu")',
        ),
        (
            Configuration(SERVERS, 2, 2, servers=1),
            'sg.ParameterServerStrategy(updates=sg.Synchronous(), devices="cpu")',
        ),
    ],
    ids=str,
)
def test_a_plan_for_cpus_names_them(chosen: Configuration, said: str) -> None:
    """On a machine with GPUs a strategy takes those by default."""
    assert advice.constructor(chosen, "cpu", 2) == said


def test_threads_that_were_planned_with_are_in_the_code() -> None:
    alone = profile(usual_threads=4)
    pasted = advice.code(choose(alone, Hardware()))
    first, _, rest = pasted.partition("\n\ntorch.set_num_threads(1)  # faster here than 4\n")
    assert first == "import torch\n\nimport stratagem as sg" and rest.startswith("strategy = ")
    many = choose(alone, Hardware(per_host=4, cores=4))
    assert many.recommendation.configuration.per_host > 1
    assert "set_num_threads" not in advice.code(many)
    assert "set_num_threads" not in advice.code(choose(profile(), Hardware()))
