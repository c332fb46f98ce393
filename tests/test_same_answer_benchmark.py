"""The table of benchmarks/same_answer: its comparing, its handling of failures, and a few cells."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "same_answer"))

import child  # noqa: E402
import launches  # noqa: E402
import pages  # noqa: E402
import same_answer  # noqa: E402
from cases import CASES, Job, weights  # noqa: E402
from comparing import Cell, compare  # noqa: E402
from launches import Failed, Found  # noqa: E402
from peers import by_hand  # noqa: E402

pytestmark = pytest.mark.timeout(120)
CASE, TWO = CASES["divides"], ("divides", "short")


def moved(by: float, first: float = 0.0, seen: list[int] | None = None) -> Found:
    """What a process left: all weights moved by so much, and the first a little farther."""
    start = weights(CASE.model())["weights"]
    values = [value + by for value in start]
    return [{"result": {"weights": [values[0] + first, *values[1:]]}, "seen": seen or []}]


def test_a_difference_is_a_share_of_the_way_that_training_went() -> None:
    assert str(compare(CASE, moved(0.5), moved(0.5))) == "equal"
    assert compare(CASE, moved(0.5), moved(0.5, 1e-6)).status == "equal"
    off = compare(CASE, moved(0.5), moved(0.5, 0.01), "a way")
    assert (off.status, off.way) == ("different", "a way") and off.amount == pytest.approx(0.02)
    assert compare(CASE, moved(0.5), moved(0.5, math.nan)).amount == math.inf
    with pytest.raises(ValueError, match="did not move"):
        compare(CASE, moved(0.0), moved(0.5))


def test_metrics_are_compared_as_they_are() -> None:
    one, other = ([{"result": {"accuracy": [a], "auc": [0.7]}, "seen": []}] for a in (0.8, 0.75))
    assert compare(CASES["evaluation"], one, other).amount == pytest.approx(0.05)


def test_another_order_of_rows_is_told() -> None:
    case = CASES["order"]
    rows = list(range(case.rows)) * case.epochs
    swapped = [rows[12], *rows[1:12], rows[0], *rows[13:]]  # of the first two batches
    twice = [rows[1], *rows[1:]]
    for seen, said in ((swapped, "2 of 8 batches hold other rows; every row"), (twice, "1 of 8")):
        cell = compare(case, moved(0.5, seen=rows), moved(0.5, 0.1, seen))
        assert cell.words.startswith(said), cell.words
    assert "not every row" in cell.words
    halves = [{**moved(0.5, 0.1)[0], "seen": [r for r in rows if r % 2 == i]} for i in range(2)]
    assert compare(case, moved(0.5, seen=rows), halves).words.startswith("0 of 8")


def test_failures_are_cells() -> None:
    error, hang = Failed("error", "ValueError: no"), Failed("hang", seconds=60.0)
    assert compare(CASE, moved(0.5), error) == Cell("error", 0.0, "ValueError: no")
    assert str(compare(CASE, moved(0.5), hang)) == "hangs (60 s)"
    assert compare(CASE, error, moved(0.5)).words == "on one device: ValueError: no"
    notes: list[str] = []
    cells = [compare(CASE, moved(0.5), found) for found in (error, hang)]
    assert pages.text(cells, notes) == "**error** [1], **hangs (60 s)**"
    assert notes == ["ValueError: no"]
    assert pages.text([Cell("equal", 1e-7), Cell("equal", 2e-7)], []) == "equal (2e-07)"
    assert pages.text([Cell("equal"), Cell("different", 0.1)], []) == "equal, **off by 10.0%**"


def test_the_script_says_when_it_is_wrong() -> None:
    tables = {"ddp": {name: {"2": [Cell("different", 0.1)]} for name in ("divides", "short")}}
    (mistake,) = same_answer.wrong(tables)
    assert mistake.startswith("ddp, batches that divide, 2 processes: off by 10.0%")


def test_errors_are_told_by_their_first_sentence() -> None:
    problem = RuntimeError(
        "[/a/pair.cc:5] Read error [127.0.0.1]:33: reset by peer. More.\nAnd more"
    )
    assert child.first_line(problem) == "RuntimeError: Read error: reset by peer"


def test_a_hang_ends_and_the_first_error_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "LIMIT", 0.2)
    for rank in range(2):
        (tmp_path / f"short:.{rank}.begun").touch()
    (tmp_path / "log").write_text("")
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert launches._wait(job, tmp_path, "short:", 2) == Failed("hang", seconds=0.2)
        for rank, (words, when) in enumerate([("a consequence", 2.0), ("the cause", 1.0)]):
            error = {"words": words, "time": when}
            (tmp_path / f"short:.{rank}.error").write_text(json.dumps(error))
        assert launches._wait(job, tmp_path, "short:", 2) == Failed("error", "the cause")
    finally:
        job.kill()
        job.wait()
    assert launches._wait(job, tmp_path, "few:", 2) is None  # it had not begun
    (tmp_path / "few:.0.begun").touch()
    assert launches._wait(job, tmp_path, "few:", 2) == Failed("error", "ended with -9")


def test_a_process_that_was_late_leaves_the_next_case_to_a_new_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PATIENCE", 0.1)
    (tmp_path / "short:.0.json").touch()
    assert not child.together(tmp_path, "short:", 0, 2)
    (tmp_path / "short:.1.json").touch()
    assert not child.together(tmp_path, "short:", 1, 2), "the first has left already"
    assert child.together(tmp_path, "few:", 0, 0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("peer", "short"), [("own_loop", "equal"), ("ddp", "different")])
def test_two_cases_of_ddp_and_of_our_own_loop(
    peer: str, short: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that divide are equal for both; with a short last batch DDP is off, however."""
    monkeypatch.setattr(same_answer, "REPLICAS", (2,))
    jobs = {name: Job(CASES[name], "", 1, tmp_path, CASES[name].data()) for name in TWO}
    hand = {f"{name}:": [{"result": by_hand.run(job), "seen": []}] for name, job in jobs.items()}
    table = same_answer.answers(peer, TWO, hand)
    assert [table["divides"][n][0].status for n in "12"] == ["equal"] * 2, table
    assert [cell.status for cell in table["short"]["1"]] == ["equal"], table
    assert {cell.status for cell in table["short"]["2"]} == {short}, table
    assert same_answer.wrong({peer: table}) == []
