"""Compressions in the plan: bytes as the codecs count them, and when none of them pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.codecs.layout import Layout
from stratagem.codecs.low_rank import LowRank, PowerSGD
from stratagem.codecs.two_sided import SliceMemory, TwoSided
from stratagem.codecs.wire_choice import reducer
from stratagem.errors import UsageError
from stratagem.launch.cli import main
from stratagem.plan import advice, report
from stratagem.plan.choose import choose
from stratagem.plan.configuration import MIRRORED, MULTI_WORKER, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.hardware import Hardware
from stratagem.plan.lossy import LOSSY, CodecTime, _NoNetwork, codec_times, sent
from stratagem.plan.lossy_advice import compared
from stratagem.plan.profile import Profile
from tests.plan.support import IDEAL, profile

shapes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1)


def model(milliseconds: float = 3.0, **changes: Any) -> Profile:
    """A profile with 8 MB of gradients, and these seconds for each compression."""
    times = tuple(CodecTime(wire, milliseconds / 1e3) for wire in LOSSY)
    return profile(codecs=times, **changes)


@given(st.sampled_from(sorted(LOSSY)), shapes, st.integers(1, 9))
def test_bytes_are_those_that_the_reducer_sends(
    wire: str, given_shapes: list[tuple[int, ...]], replicas: int
) -> None:
    layout = Layout(tuple(map(str, range(len(given_shapes)))), tuple(given_shapes))
    network = _NoNetwork(replicas)
    made = reducer(cast(Any, network), LOSSY[wire])
    flat = made.buffer(sum(layout.counts), torch.float32, torch.device("cpu"))
    memory = cast(Any, made).memory(flat, layout)
    found = sent(wire, layout.shapes, 4, replicas)
    if isinstance(made, TwoSided):
        assert isinstance(memory, SliceMemory)
        assert found.bytes(replicas) == 2 * (replicas - 1) * memory.width
    else:
        assert isinstance(made, LowRank) and isinstance(LOSSY[wire], PowerSGD)
        packs = sorted(pack.nbytes for pack in made._packs.values())
        assert sorted(found.rounds) == packs


def test_a_step_is_computing_encoding_and_what_travels() -> None:
    hosts = Configuration(MULTI_WORKER, 4, wire="Int8()")
    found = predict(model(), Hardware(hosts=4, link=1e8, latency=0.0), hosts, IDEAL)
    goes = sent("Int8()", profile().shapes, 4, 4)
    assert goes.bytes(4) == pytest.approx(2 * 3 * 5e5, rel=0.01)  # a quarter of 8 MB, in slices
    assert found.step == pytest.approx(0.03 + 0.001 + 0.003 + goes.bytes(4) / 1e8)
    assert found.parts["compressing"] == 0.003


def test_replicas_of_a_host_share_its_link() -> None:
    machine = Hardware(hosts=4, per_host=2, link=1e8, latency=0.0, cores=8)
    carried = {
        per_host: predict(
            model(), machine, Configuration(MULTI_WORKER, 4, per_host, wire="Sign()"), IDEAL
        ).step
        for per_host in (1, 2)
    }
    assert carried[2] > carried[1]


@pytest.mark.parametrize("wire", [None, "Int8()", "PowerSGD()"])
def test_who_meets_every_few_steps_sends_as_much_less(wire: str | None) -> None:
    machine = Hardware(hosts=4, link=1e7, latency=1e-3)
    steps = {
        every: predict(model(), machine, Configuration(MULTI_WORKER, 4, wire=wire, every=every))
        for every in (1, 10, 20)
    }
    alone = 0.031 + 250e-6
    ten, twenty = steps[10].step - alone, steps[20].step - alone
    assert ten == pytest.approx(2 * twenty) and steps[1].step > steps[10].step


@pytest.mark.parametrize("wire", [None, "Int8()"])
def test_fragments_travel_beside_updates(wire: str | None) -> None:
    """Sending a fragment is hidden behind `overlap` updates of 31 ms, and no longer."""
    cfg = Configuration(MULTI_WORKER, 2, wire=wire, every=20, fragments=4, overlap=0)
    for link, all_hidden in ((1e6, False), (1e9, True)):
        machine = Hardware(hosts=2, link=link, latency=0.0)
        still, beside, whole = (
            predict(model(), machine, each, IDEAL)
            for each in (cfg, replace(cfg, overlap=None), replace(cfg, fragments=1))
        )
        assert still.step == pytest.approx(whole.step)  # as many bytes
        if all_hidden:
            others = beside.parts["meeting"] + beside.parts.get("compressing", 0.0)
            assert beside.step == pytest.approx(0.031 + others) and beside.step < still.step
        else:
            assert beside.step == pytest.approx(still.step - 2 * 0.031 * 4 / 20)
    assert cfg.family.endswith("every 20 steps, 4 fragments")
    with pytest.raises(UsageError, match="multiple of fragments"):
        replace(cfg, fragments=3)


def test_who_meets_every_few_steps_waits_for_the_slowest_in_that_many() -> None:
    uneven = replace(model(), samples=(0.02, 0.03, 0.04))
    parts = {
        every: predict(uneven, Hardware(hosts=4), Configuration(MULTI_WORKER, 4, every=every)).parts
        for every in (1, 16)
    }
    assert parts[1]["stragglers"] > 0.001 and "meeting" not in parts[1]
    assert parts[16]["stragglers"] == pytest.approx(parts[1]["stragglers"] / 4)
    assert parts[16]["meeting"] == pytest.approx(5 * 8e6 / Hardware().local / 16, rel=0.01)


def test_on_a_slow_link_it_pays() -> None:
    plan = choose(model(), Hardware(hosts=8, link=1.25e7), lossy=True)
    rows = compared(plan)
    assert len(rows) == 3 + len(LOSSY) and rows[0].gain == 1.0
    assert max(row.gain for row in rows) > 2
    best = plan.recommendation.configuration
    assert best.lossy and f"wire=sg.{best.wire}" in advice.code(plan)
    said = advice.sentence(plan)
    assert "sg.PowerSGD() makes" in said and "(sg.DiLoCo(20) " in said
    seldom = Configuration(MULTI_WORKER, 8, every=20)
    assert "(sync=sg.DiLoCo(20))" in advice.constructor(seldom, "cuda", 1)
    in_turn = advice.constructor(replace(seldom, fragments=4), "cuda", 1)
    assert "(sync=sg.DiLoCo(20, fragments=4))" in in_turn
    said = report.text(plan, width=120)
    assert "no longer those of one device" in " ".join(said.split()) and "times as fast" in said


def test_on_a_fast_link_nothing_of_it_pays() -> None:
    plan = choose(model(20.0), Hardware(hosts=8, link=25e9 / 8), lossy=True)
    assert not plan.recommendation.configuration.inexact
    assert "At 25Gbit nothing of this pays" in advice.sentence(plan)
    assert all(row.gain < 1 for row in compared(plan)[1:-2])
    assert all(row.gain > 1 for row in compared(plan)[-2:])
    assert "though fewer meetings would: sg.DiLoCo(20)" in advice.sentence(plan)
    assert report.to_json(plan)["lossy"][1]["times_as_fast"] < 1


def test_who_does_not_ask_is_offered_none() -> None:
    plan = choose(model(), Hardware(hosts=8, link=1.25e7))
    assert not any(cfg.inexact for cfg in plan.tried)
    assert "pays" not in advice.sentence(plan) and report.to_json(plan)["lossy"] == []
    one = choose(model(), Hardware(), lossy=True)
    assert "several hosts" in advice.sentence(one)


def test_what_is_not_planned_is_refused() -> None:
    with pytest.raises(UsageError, match="MultiWorkerMirroredStrategy"):
        Configuration(MIRRORED, per_host=2, wire="Int8()")
    with pytest.raises(UsageError, match="one of Int8"):
        Configuration(MULTI_WORKER, 2, wire="int4")
    with pytest.raises(UsageError, match="--lossy"):
        predict(profile(), Hardware(hosts=2), Configuration(MULTI_WORKER, 2, wire="Int8()"))


def test_only_sgd_goes_with_the_coarse_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each.wire for each in codec_times(((64, 64), (64,)), linear=False)}
    assert found == {"Int8()", "PowerSGD()"}
    every = codec_times(((64, 64), (64,)), linear=True)
    assert {each.wire for each in every} == set(LOSSY) and all(each.seconds > 0 for each in every)
    # of a large model the first parameters are tried, and the rest is reckoned by its size
    monkeypatch.setattr("stratagem.plan.lossy._MOST", 4096)
    assert all(
        each.seconds > 0 for each in codec_times(((61, 67), (3,)), linear=True)
    )  # odd slices
    part = codec_times(((64, 64),) * 50, linear=False)
    assert all(each.seconds > 0 for each in part)


def test_of_few_replicas_each_encodes_more_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas encode half of it each, eight an eighth, as measured with the reducer."""
    took = {2: 3.5, 8: 3.125}  # a second to encode the gradient, or the sum, and two to decode
    monkeypatch.setattr("stratagem.plan.lossy._seconds", lambda record, shapes, n: took[n])
    found = {each.wire: each for each in codec_times(((8, 8),), linear=True)}
    assert found["Sign()"].among(4) == pytest.approx(3.25)
    assert found["PowerSGD()"].among(2) == found["PowerSGD()"].among(8) == 3.5  # has no slices
    times = tuple(replace(each, seconds=3e-3, whole_sum=4e-3) for each in found.values())
    two, four = (
        predict(
            profile(codecs=times),
            Hardware(hosts=n),
            Configuration(MULTI_WORKER, n, wire="Int8()"),
            IDEAL,
        )
        for n in (2, 4)
    )
    assert two.parts["compressing"] == pytest.approx(5e-3)
    assert four.parts["compressing"] == pytest.approx(4e-3)


def test_an_earlier_plan_without_encodings(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "plan.json"
    file.write_text(report.dumps(choose(profile(), Hardware(hosts=2))))
    assert main(["plan", "--from", str(file), "--lossy"]) == 2
    assert "without --lossy" in capsys.readouterr().err
    file.write_text(report.dumps(choose(model(), Hardware(hosts=2), lossy=True)))
    assert main(["plan", "--from", str(file), "--lossy", "--link", "100Mbit"]) == 0
    measured, _ = report.from_json(file.read_text())
    assert measured == replace(model())
