"""A pipeline in virtual time: real schedules, given links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.launch.cli import main
from stratagem.plan.simulation.spread import Constant, Lognormal
from stratagem.plan.simulation.stages import StageScenario, simulate_stages
from stratagem.rules.schedules import SCHEDULES
from stratagem.wire.simulated import Topology
from tests.rules.schedule_rows import run

PARTS = {"gpipe": 1, "1f1b": 1, "eager": 1, "interleaved": 2}


def scenario(**changes: Any) -> StageScenario:
    given: dict[str, Any] = {
        "stages": 4,
        "microbatches": 8,
        "steps": 2,
        "compute": Constant(1.0),
        "crossing": 0.0,
        "topology": Topology(1e9),
    }
    return StageScenario(**{**given, **changes})


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 3))
def test_equal_stages_wait_as_the_schedule_has_it(name: str, stages: int, each: int) -> None:
    """With forward as long as backward, a batch takes as many operations as `run` counts."""
    many = stages * each
    found = simulate_stages(scenario(stages=stages, microbatches=many, schedule=name, forward=0.5))
    slots = len(run(SCHEDULES[name], stages, many, PARTS[name])[0])
    assert found.step == pytest.approx(slots * 0.5 / (stages * PARTS[name] * many))
    assert found.bubble == pytest.approx(found.least_bubble)
    assert found.seconds == pytest.approx(2 * found.step)


def test_a_slow_link_is_the_pace_of_all() -> None:
    """The link behind stage 1 takes 0.1 s a microbatch, longer than any stage."""
    free = scenario(crossing=8e6)
    slow = simulate_stages(replace(free, links={1: 1e7}))
    assert simulate_stages(free).step < 0.4
    # forward: eight messages behind one another, and what the stages before and after add
    assert slow.step > 8 * 0.1
    assert simulate_stages(slow.scenario.without_links).step == pytest.approx(11 / 32)
    assert slow.bubble > slow.least_bubble + 0.3


def test_stages_of_a_host_do_not_use_the_link() -> None:
    two = Topology(1e6, per_host=2)  # one cut of three is between hosts
    apart = simulate_stages(scenario(crossing=8e6, topology=Topology(1e6)))
    near = simulate_stages(scenario(crossing=8e6, topology=two))
    assert near.step < apart.step
    inside = simulate_stages(scenario(stages=2, crossing=8e6, topology=two))
    assert inside.bubble == pytest.approx(inside.least_bubble)


def test_a_slow_stage_and_chance_make_the_others_wait() -> None:
    slow = simulate_stages(scenario(slow={2: 2.0}))
    assert slow.busy[2] == max(slow.busy) and slow.busy[2] == pytest.approx(2 * slow.busy[0])
    spread = scenario(compute=Lognormal(1.0, 0.3), seed=3)
    assert simulate_stages(spread) == simulate_stages(spread)
    assert simulate_stages(spread).lines != simulate_stages(replace(spread, seed=4)).lines


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 0}, "1 or more"),
        ({"schedule": "columns"}, "gpipe, 1f1b, eager, interleaved."),
        ({"links": {3: 1e6}}, "behind stage 0 to 2"),
        ({"slow": {4: 2.0}}, "stages 0 to 3"),
        ({"crossing": -1.0}, "0 bytes or more"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        scenario(**changes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    words = ["simulate", "--stages", "3", "--microbatches", "6", "--steps", "3", "--compute", "1s"]
    assert main([*words, "--slow-link", "1:100Mbit", "--crossing", "4MB", "--json", str(file)]) == 0
    shown, told = capsys.readouterr().out, json.loads(file.read_text())
    assert "device 2  " in shown and "longer than without them (444.4ms)" in shown
    assert told["step_s"] > 1.5 * told["step_without_links_s"] and told["bubble"] > 0.5
    assert told["least_bubble"] == 0.25 and len(told["first_batch"]) == 3 * 6 * 2
    for bad in (["--faults", "2"], ["--slow-link", "x"], ["--schedule", "zb"]):
        assert main([*words, *bad]) == 2
