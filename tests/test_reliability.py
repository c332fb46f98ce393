"""The short form of every figure in docs/reliability.md (benchmarks/reliability)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.hosts import ROOT, needs_hosts

sys.path.insert(0, str(ROOT / "benchmarks" / "reliability"))
import malformed
import parts_apart
import reliability

pytestmark = pytest.mark.timeout(170)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def differences(lines: list[str]) -> list[float]:
    return [float(each) for line in lines for each in re.findall(r"\d\.\de-\d\d|0\.0e\+00", line)]


def test_nothing_malformed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none accepted" in malformed.malformed(400)[0]
    monkeypatch.setattr(malformed.CheckpointFolder, "flaw", lambda *_: None)
    with pytest.raises(AssertionError, match="a malformed checkpoint was accepted"):
        malformed.malformed(40)


def test_kills_at_random_moments() -> None:
    lines = reliability.at_random("ring", 2, 2)
    assert "2 seeds" in lines[0] and max(differences(lines[:1])) < 1e-13, lines


@pytest.mark.slow
def test_seeds_in_several_processes() -> None:
    """Workers of servers die there, too."""
    lines = reliability.at_random(reliability.SERVERS, 2, 2, jobs=2)
    assert "2 seeds" in lines[0] and max(differences(lines[:1])) < 1e-13, lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "figure", [lambda: reliability.many_kills(2, 2, 0.01), lambda: reliability.cost(2, 1)]
)
def test_long_runs_in_short(figure: Any) -> None:
    lines = figure()
    assert lines and all(line.startswith("| ") and line.endswith(" |") for line in lines)


@pytest.mark.slow
@needs_hosts
def test_a_cable_and_a_worker_that_joins() -> None:
    cut, joining = reliability.hosts(30, cut=5.0)
    assert "survived; named after" in cut and max(differences([cut])) < 1e-12, cut
    assert re.search(r"stand still \d\.\d{3} s.*the transfer of state takes \d\.\d{3} s", joining)


def test_a_part_that_fails_or_hangs_is_told_and_the_rest_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    here = f"import sys, os, time; sys.path.insert(0, {str(ROOT / 'benchmarks/reliability')!r})\n"
    here += "from parts_apart import report\n"
    works = {
        "one": "report(lambda: ['| one | 1 |', '| more | 2 |'])",
        "raises": "report(lambda: [][1])",
        "dies": "os._exit(7)",
        "hangs": "time.sleep(60)",
        "last": "report(lambda: ['| last | 3 |'])",
    }
    parts = [(title, [sys.executable, "-c", here + work]) for title, work in works.items()]
    lines, well = parts_apart.table(parts, limit=4.0)
    assert not well and lines[2:] == [
        "| one | 1 |",
        "| more | 2 |",
        "| raises | FAILED: IndexError: list index out of range |",
        "| dies | FAILED: exit code 7 |",
        "| hangs | FAILED: it has not ended within 4 s |",
        "| last | 3 |",
    ]
    told = capfd.readouterr()
    assert "== 4 of 5: hangs (" in told.err and "NOT ALL WENT WELL" in told.err
    assert "| last | 3 |" in told.out
    assert parts_apart.table(parts[:1], limit=4.0)[1]


def test_weights_that_differ_are_an_error() -> None:
    one = [torch.zeros(2)]
    assert reliability.distance(one, [torch.full((2,), 1e-14)]) == 1e-14
    for other in (1e-12, float("nan")):
        with pytest.raises(AssertionError, match="a weight differs by"):
            reliability.distance(one, [torch.full((2,), other)])
