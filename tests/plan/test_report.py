"""The plan as text and JSON; files are written whole or not at all."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from stratagem.plan import advice, report
from stratagem.plan.choose import Plan, choose
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import Profile, SparseTable
from tests.plan.support import profile


@pytest.fixture(scope="module")
def plan() -> Plan:
    return choose(profile(), Hardware(hosts=8, link=1.25e8, cores=2), most=8)


def test_text_has_it_all(plan: Plan) -> None:
    text = report.text(plan, width=160)
    for word in (
        "Net: 64 examples a replica",
        "8 MB",
        "8 hosts of 1, 1Gbit links",
        "strategy = sg.",
        "MultiWorkerMirrored",
        "batch_size = ",
        "asynchronous",
        "spares",
    ):
        assert word in text
    best = plan.recommendation
    assert f"{best.speedup:.1f}x one device" in text


def test_every_row_has_the_number_that_it_is_worth_it_to(plan: Plan) -> None:
    """With 1 server on 8 hosts there are 7 workers at most, which have a column."""
    listed = report.text(plan, width=200).splitlines()
    heads = next(line for line in listed if line.strip().startswith("strategy")).split()
    ends = [str(at.replicas) for _, _, at in report.shown(plan)]
    assert set(ends) - {"1", "2", "4", "8"} and set(ends) <= set(heads)


def test_narrow_terminals_lose_nothing(plan: Plan) -> None:
    assert "batch_size = " in report.text(plan, width=60)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_word_is_broken(width: int) -> None:
    """On a terminal, which itself would break a long line within a word."""
    plan = choose(profile(), Hardware(hosts=32, per_host=2, link=1.25e8, cores=2))
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, no_color=True)
    report.render(plan, console)
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    table, _, rest = text.partition("Take")
    said, _, _ = rest.partition("    import")
    assert all(len(line) <= width for line in (table + said).splitlines())
    words = {*table.split()}
    for name, _, at in report.shown(plan):
        assert {*name.split(), *at.reason.split()} <= words
    assert f" {plan.recommendation.configuration.replicas} " in table
    assert {*advice.sentence(plan).split()} <= {"Take", *said.split()}


def test_rows_have_throughput_and_efficiency(plan: Plan) -> None:
    """For each strategy and number of replicas, in 80 columns."""
    out = io.StringIO()
    report.render(plan, Console(file=out, width=80), rows=True)
    text = out.getvalue()
    for word in ("replicas", "examples/s", "speedup", "efficiency"):
        assert word in text
    listed, _, rest = text.partition("Take")
    assert rest and all(len(line) <= 80 for line in listed.splitlines()[2:])
    for _, row, _ in report.shown(plan):
        for each in row:
            figures = f"{each.rate:,.0f}", f"{each.speedup:.2f}", f"{each.efficiency:.0%}"
            assert any(all(f in line.split() for f in figures) for line in listed.splitlines())


def test_json_has_every_prediction(plan: Plan) -> None:
    told = json.loads(report.dumps(plan))
    assert len(told["predictions"]) == len(plan.predictions)
    assert Profile.from_json(told["profile"]) == plan.profile
    assert Hardware.from_json(told["hardware"]) == plan.hardware
    one = told["predictions"][-1]
    assert sum(one["parts_s"].values()) == pytest.approx(one["step_s"])
    assert told["recommendation"]["code"] and told["recommendation"]["sentence"]


def test_a_restless_machine_is_noted() -> None:
    assert report.warnings(profile(samples=(1.0,) * 8 + (2.0,) * 2)) != []
    assert report.warnings(profile(samples=(1.0,) * 10)) == []


def test_sparse_rows_are_told() -> None:
    assert "12 sparse rows" in report.heading(profile(sparse=(SparseTable(100, 64, 12.0),)))


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    report.write(target, "one")
    report.write(target, "two")
    assert target.read_text() == "two" and list(tmp_path.iterdir()) == [target]
    with pytest.raises(OSError):
        report.write(tmp_path / "no folder" / "plan.json", "x")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        report.write(tmp_path / "taken", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "taken"]
