"""`stratagem simulate`: its options and its output."""

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
    [
        ("--servers", "0", "--overlap", "0.5"),
        ("--spares", "1", "--spread", "lognormal:0.3"),
        ("--asynchronous", "--stragglers", "0.1:10"),
        ("--bound", "2", "--spread", "pareto:3"),
        ("--buffer", "3", "--slow", "0:5", "--spread", "exponential:0.8"),
        ("--faults", "4", "--patience", "1s", "--per-host", "2"),
    ],
    ids=" ".join,
)
def test_a_seed_can_be_replayed(tmp_path: Path, options: tuple[str, ...]) -> None:
    traces = []
    for seed in ("7", "7", "8"):
        file = tmp_path / "trace.json"
        main(
            [
                "simulate",
                "--steps",
                "15",
                "--bytes",
                "1MB",
                *options,
                "--seed",
                seed,
                "--trace",
                str(file),
            ]
        )
        traces.append(json.loads(file.read_text()))
    assert traces[0] == traces[1]
    chance = {"--spread", "--faults", "--stragglers"} & set(options)
    assert (traces[0]["digest"] != traces[2]["digest"]) == bool(chance)


@pytest.mark.parametrize("kind", ["constant", "exponential:0.5", "lognormal:0.8", "pareto:2.5"])
def test_compute_is_the_average_of_every_spread(tmp_path: Path, kind: str) -> None:
    run = told(tmp_path, "--workers", "1", "--servers", "0", "--spread", kind, "--steps", "20000")
    assert run["seconds"] == pytest.approx(20000 * 0.1, rel=0.03)
    assert run["busy"] == pytest.approx(1.0, rel=0.03)


def test_steps_are_those_of_each_worker_where_nobody_waits(tmp_path: Path) -> None:
    run = told(tmp_path, "--workers", "50", "--asynchronous", "--bytes", "0B", "--latency", "0s")
    assert run["updates"] == 20 * 50 and run["seconds"] == pytest.approx(20 * 0.1)


def test_faults_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(tmp_path, "--workers", "4", "--faults", "3", "--seed", "5")
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("of worker") == 3 and " at " in shown


def test_faults_come_at_any_time_of_the_run(tmp_path: Path) -> None:
    """A narrow link makes the run ten times as long as its computation."""
    file = tmp_path / "trace.json"
    main(
        [
            "simulate",
            "--steps",
            "20",
            "--workers",
            "4",
            "--bytes",
            "100MB",
            "--link",
            "4Gbit",
            "--faults",
            "40",
            "--patience",
            "1000s",
            "--trace",
            str(file),
        ]
    )
    events = json.loads(file.read_text())["events"]
    struck = [at for at, what, _, _ in events if what in ("kill", "stall", "cut")]
    assert max(struck) > 10.0 and sum(at < 2.0 for at in struck) < len(struck) / 2


def test_nothing_is_simulated_if_it_could_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "run.json"
    for bad in (tmp_path / "nowhere" / "trace.json", tmp_path, good):
        assert main(["simulate", "--steps", "2", "--json", str(good), "--trace", str(bad)]) == 2
        told = capsys.readouterr()
        assert not good.exists() and not told.out and told.err.count("\n") == 1


def test_messages_cost_what_is_said(tmp_path: Path) -> None:
    run = told(
        tmp_path, "--workers", "1", "--bytes", "0B", "--latency", "0s", "--overhead", "10ms:20ms"
    )
    # the last push is applied before it is answered
    assert run["seconds"] == pytest.approx(20 * (0.1 + 0.02 + 0.04), rel=0.01)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        # 4 workers, 1 MB at 1 GB/s: a ring takes 2 * 3/4 ms
        (("--wire", "bfloat16"), 20 * 0.00075),
        (("--wire", "Int8"), 20 * 0.0015 / 4 * (1 + 4 / 1024)),
        (("--wire", "sg.TopK(0.01)", "--overlap", "0.5"), 20 * 0.0015 * 0.02 / 10),
        (("--sync", "EveryStep"), 20 * 0.0015),
        (("--sync", "LocalSteps(10)"), 2 * 0.0015),
        (("--sync", "LocalSteps(5, after=10)", "--wire", "bfloat16"), 10 * 0.0015 + 2 * 0.00075),
        # one half is hidden behind training, the other is sent at the end, the first once more
        (("--sync", "DiLoCo(20, fragments=2, overlap=5)"), 0.0015),
        (("--sync", "DiLoCo(10, sg.Outer(0.5), overlap=0, wire=Int8())"), 2 * 0.0015 / 4),
        (("--sync", "Gossip"), 20 * 0.002 + 0.0015),
    ],
    ids=str,
)
def test_what_travels_and_when(tmp_path: Path, options: tuple[str, ...], more: float) -> None:
    given = ("--servers", "0", "--workers", "4", "--bytes", "1MB", "--link", "8Gbit")
    run = told(tmp_path, *given, "--latency", "0s", *options)
    assert isinstance(run["seconds"], float)
    assert run["seconds"] - 20 * 0.1 == pytest.approx(more, rel=0.02)


def test_a_recorded_trace(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text("[0.25]")
    run = told(
        tmp_path,
        "--workers",
        "2",
        "--bytes",
        "0B",
        "--latency",
        "0s",
        "--spread",
        f"trace:{tmp_path / 'steps.json'}",
    )
    assert run["seconds"] == pytest.approx(20 * 0.25)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--link", "0Gbit"), "more than 0"),
        (("--workers", "0"), "1 or more"),
        (("--spread", "wide"), "none of"),
        (("--spares", "9"), "nobody"),
        (("--servers", "0", "--asynchronous"), "--servers 1"),
        (("--servers", "0", "--wire", "Int4"), "is not known"),
        (("--servers", "0", "--wire", "TopK(0.01"), "no record such as"),
        (("--servers", "0", "--sync", "DiLoCo"), "no record such as"),
        (("--servers", "0", "--sync", "DiLoCo(open('x'))"), "no record such as"),
        (("--servers", "0", "--sync", "Int8()"), "none of 'LocalSteps(20)'"),
        (("--servers", "0", "--wire", "PowerSGD(4)"), "shapes of a model"),
        (("--servers", "0", "--sync", "LocalSteps(5)", "--faults", "2"), "without faults"),
        (("--sync", "LocalSteps(5)"), "servers=0"),
        (("--stages", "2", "--wire", "Int8"), "--wire is of workers"),
        (("--stragglers", "often"), "PART:TIMES"),
        (("--stragglers", "0.02"), "PART:TIMES"),
        (("--slow", "1"), "WORKER:TIMES"),
        (("--slow", "1.7:2"), "WORKER:TIMES"),
        (("--slow", "1:inf"), "WORKER:TIMES"),
        (("--stragglers", "0.1:inf"), "PART:TIMES"),
        (("--spread", "pareto:1"), "no average"),
        (("--spread", "lognormal"), "none of"),
        (("--spread", "lognormal:50"), "median"),
        (("--overlap", "1"), "less than 1"),
        (("--spread", "trace:nowhere.json"), "cannot be read"),
        (("--asynchronous", "--spares", "1"), "--spares"),
        (("--bytes", "-1MB"), "--bytes"),
        (("--compute", "soon"), "--compute"),
        (("--slow", "99:2", "--workers", "4"), "worker"),
        (("--overhead", "1ms"), "WORKER:SERVER"),
        (("--json", "/nowhere/run.json"), "there is no folder '/nowhere'"),
    ],
    ids=str,
)
def test_refused_in_a_sentence(
    options: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--steps", "2", *options]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1 and "Traceback" not in error
