"""`stratagem simulate`: what the options mean, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stratagem.launch.cli import main


def told(tmp_path: Path, *options: str) -> dict[str, object]:
    file = tmp_path / "run.json"
    assert main(["simulate", "--steps", "20", *options, "--json", str(file)]) == 0
    found: dict[str, object] = json.loads(file.read_text())
    return found


def test_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 4 workers, 1 MB each at 1 GB/s: out of one server in turn, 4 ms; the last is in after 1 ms
    run = told(tmp_path, "--workers", "4", "--bytes", "1MB", "--link", "8Gbit", "--latency", "0s")
    assert run["seconds"] == pytest.approx(20 * (0.1 + 0.005))
    assert run["busy"] == pytest.approx(0.1 / 0.105)
    assert "updates a second" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [("--servers", "0", "--overlap", "0.5"), ("--spares", "1", "--spread", "lognormal:0.3"),
     ("--asynchronous", "--stragglers", "0.1:10"), ("--bound", "2", "--spread", "pareto:3"),
     ("--buffer", "3", "--slow", "0:5", "--spread", "exponential:0.8"),
     ("--faults", "4", "--patience", "1s", "--per-host", "2")],
    ids=" ".join,
)  # fmt: skip
def test_a_seed_can_be_replayed(tmp_path: Path, options: tuple[str, ...]) -> None:
    traces = []
    for seed in ("7", "7", "8"):
        file = tmp_path / "trace.json"
        main(["simulate", "--steps", "15", "--bytes", "1MB", *options, "--seed", seed,
              "--trace", str(file)])  # fmt: skip
        traces.append(json.loads(file.read_text()))
    assert traces[0] == traces[1]
    chance = {"--spread", "--faults", "--stragglers"} & set(options)
    assert (traces[0]["digest"] != traces[2]["digest"]) == bool(chance)


def test_messages_cost_what_is_said(tmp_path: Path) -> None:
    run = told(tmp_path, "--workers", "1", "--bytes", "0B", "--latency", "0s", "--overhead",
               "10ms:20ms")  # fmt: skip
    # the last push is applied before it is answered
    assert run["seconds"] == pytest.approx(20 * (0.1 + 0.02 + 0.04), rel=0.01)


def test_a_recorded_trace(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text("[0.25]")
    run = told(tmp_path, "--workers", "2", "--bytes", "0B", "--latency", "0s", "--spread",
               f"trace:{tmp_path / 'steps.json'}")  # fmt: skip
    assert run["seconds"] == pytest.approx(20 * 0.25)


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--link", "0Gbit"), "more than 0"), (("--workers", "0"), "1 or more"),
     (("--spread", "wide"), "none of"), (("--spares", "9"), "nobody"),
     (("--servers", "0", "--asynchronous"), "--servers 1"), (("--stragglers", "often"), "number"),
     (("--overlap", "1"), "less than 1"), (("--spread", "trace:nowhere.json"), "cannot be read"),
     (("--asynchronous", "--spares", "1"), "--spares"), (("--bytes", "-1MB"), "--bytes"),
     (("--compute", "soon"), "--compute"), (("--slow", "99:2", "--workers", "4"), "worker"),
     (("--json", "/nowhere/run.json"), "cannot be written")],
    ids=str,
)  # fmt: skip
def test_refused_in_a_sentence(
    options: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--steps", "2", *options]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1 and "Traceback" not in error
