"""`stratagem plan`: a script up to its fit, a table, files; misuse is one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from stratagem.cluster.environment import cores
from stratagem.launch import cli
from stratagem.launch.probe import CheckRow, Speed, measured
from stratagem.plan import advice
from stratagem.plan.choose import choose
from stratagem.plan.formulas import Calibration
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import SparseTable
from stratagem.plan.report import dumps
from stratagem.strategies.strategy import Strategy
from tests.clock import PATIENCE
from tests.plan.support import profile

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import argparse
import torch
import stratagem as sg

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
args = parser.parse_args()
net = torch.nn.Sequential(torch.nn.Linear(20, args.width), torch.nn.Linear(args.width, 3))
model = sg.Model(net, sg.MirroredStrategy(["cpu:0", "cpu:1"]))
model.compile("adam", "cross_entropy", metrics=["accuracy"])
x, y = torch.randn(100, 20), torch.randint(0, 3, (100,))
try:
    model.fit(x, y, batch_size=40, epochs=100000)
except Exception:
    print("the script went on")
print("the script went on")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little: these tests are about options and output, not about predictions."""
    monkeypatch.setattr("stratagem.plan.measure._SECONDS", 0.2)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def test_hosts_of_several_devices_are_told(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --hosts 8 on a machine with 3 cores the plan has 24 replicas, and says so."""
    monkeypatch.setattr("stratagem.plan.machine.cores", lambda: 3)
    words, of = ["plan", "--quick", "--hosts", "8"], ["train.py", "--width", "8"]
    assert cli.main([*words, *of]) == 0
    told = "hosts of 3, as this machine, so 24 replicas at most; --gpus-per-host sets another"
    shown = capsys.readouterr()
    assert told in shown.err and "…" not in shown.out, "a figure is cut in a pipe"
    assert cli.main([*words, "--gpus-per-host", "3", *of]) == 0
    assert "replicas at most" not in capsys.readouterr().err


def test_a_plan_from_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--quick",
        "--link",
        "1Gbit",
        "--hosts",
        "4",
        "--gpus-per-host",
        "2",
        "--json",
        "plan.json",
        "--html",
        "plan.html",
        "train.py",
        "--width",
        "8",
    ]
    before = list(sys.argv), list(sys.path)
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert "the script went on" not in shown.out and "strategy" in shown.out
    assert "up to its first fit" in shown.err
    assert "assumed --latency 50us; say what you have" in shown.err
    told = json.loads(Path("plan.json").read_text())
    assert told["profile"]["batch"] == 20  # half of the script's, which has two replicas
    assert told["profile"]["buckets"][0]["size"] == (20 * 8 + 8 + 8 * 3 + 3) * 4
    assert told["hardware"]["link"] == 1.25e8 and told["hardware"]["hosts"] == 4
    assert max(p["replicas"] for p in told["predictions"]) == 8
    assert "<svg" in Path("plan.html").read_text()
    assert sorted(p.name for p in script.parent.iterdir()) == ["plan.html", "plan.json", "train.py"]
    assert (sys.argv, sys.path) == before


@pytest.mark.slow
def test_the_code_trains_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The code is pasted above a script, which is started as the code says."""
    monkeypatch.chdir(tmp_path)
    pasted = advice.code(choose(profile(batch=3, device="cuda"), Hardware(hosts=2, link=1.25e8)))
    assert "sg.MultiWorkerMirroredStrategy(wire" in pasted
    (tmp_path / "train.py").write_text(f"{pasted}\n{TRAINING}")
    start = next(line for line in pasted.splitlines() if "stratagem run" in line)
    assert cli.main(start.removeprefix("# stratagem ").split()) == 0
    assert capfd.readouterr().out.count("trained on 2 with 6") == 2


TRAINING = """
import torch
model = sg.Model(torch.nn.Linear(2, 1), strategy)
model.compile("sgd", "mse")
model.fit(torch.ones(12, 2), torch.ones(12, 1), batch_size=batch_size, verbose=0)
print("trained on", strategy.num_replicas_in_sync, "with", batch_size)
"""


def test_other_links_without_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = choose(profile(), Hardware(hosts=4, link=1.25e7))
    Path("plan.json").write_text(dumps(first))
    words = ["plan", "--from", "plan.json", "--hosts", "4", "--json", "fast.json"]
    assert cli.main([*words, "--link", "100Gbit"]) == 0
    fast = json.loads(Path("fast.json").read_text())
    assert fast["profile"] == json.loads(dumps(first))["profile"]
    assert fast["recommendation"]["speedup"] > first.recommendation.speedup
    assert "hosts of 1, as in plan.json" in capsys.readouterr().err
    assert cli.main([*words, "--gpus-per-host", "2"]) == 0
    assert "as in plan.json" not in capsys.readouterr().err
    for bad in ([*words, "train.py"], ["plan", "--from", "none.json"], [*words, "--validate"]):
        assert cli.main(bad) == 2
    assert cli.main([*words, "--rounds", "2"]) == 2
    Path("plan.json").write_text("{}")
    assert cli.main(words) == 2 and "no plan as --json writes it" in capsys.readouterr().err


def test_links_as_check_has_seen_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(dumps(choose(profile(), Hardware(hosts=4))))
    rows = [
        CheckRow("worker 0", "a:1", "this task"),
        measured("worker 1", "b:1", Speed(4e-4, 2e7, 1e7)),
        measured("worker 2", "c:1", Speed(2e-4, 3e7, 4e7)),
    ]
    Path("check.json").write_text(json.dumps({"tasks": [asdict(row) for row in rows]}))
    words = ["plan", "--from", "plan.json", "--network", "check.json", "--json", "seen.json"]
    assert cli.main(words) == 0
    told = json.loads(Path("seen.json").read_text())["hardware"]
    assert told["link"] * Calibration().goodput == pytest.approx(1e7), "of the slowest"
    assert told["latency"] == 2e-4
    capsys.readouterr()
    Path("check.json").write_text(json.dumps({"tasks": [asdict(rows[0])]}))
    assert cli.main(words) == 2 and "no task was measured" in capsys.readouterr().err
    Path("check.json").write_text("[]")
    assert cli.main(words) == 2 and "stratagem check --json" in capsys.readouterr().err
    assert cli.main([*words, "--link", "1Gbit"]) == 2


def test_batch_and_max_are_as_asked(script: Path) -> None:
    words = [
        "plan",
        "--quick",
        "--batch",
        "300",
        "--max",
        "3",
        "--json",
        "p.json",
        "--",
        "train.py",
        "--width",
        "4",
    ]
    assert cli.main(words) == 0
    told = json.loads(Path("p.json").read_text())
    assert told["profile"]["batch"] == 300
    assert max(p["replicas"] for p in told["predictions"]) <= 3


def test_help_is_quick_and_complete() -> None:
    source = """
import sys
import time
from stratagem.launch import cli
assert cli.main(["plan", "--help"]) == 0
heavy = {"torch", "numpy", "rich", "matplotlib"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in (
        "--link RATE",
        "--latency TIME",
        "--hosts H",
        "--gpus-per-host G",
        "--max N",
        "--batch B",
        "--json FILE",
        "--html FILE",
        "--validate",
    ):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which script?"),
        (["no.py"], "there is no script 'no.py'"),
        (["--link", "0Gbit", "train.py"], "must be more than 0"),
        (["--link", "fast", "train.py"], "'fast' is not the speed of --link"),
        (["--latency", "-5us", "train.py"], "--latency"),
        (["--hosts", "0", "train.py"], "'0' is not a whole number, 1 or more"),
        (["--max", "0", "train.py"], "'0' is not a whole number, 1 or more"),
        (["--json", "no/plan.json", "train.py"], "there is no folder 'no'"),
        (["--html", ".", "train.py"], "is a folder"),
        (["--json", "p", "--html", "./p", "train.py"], "--json and --html name the same file"),
        (["--link", "-5Gbit", "train.py"], "--link: expected one argument, and what begins with -"),
        (["--nonsense", "train.py"], "--nonsense"),
        (["--network", "no.json", "train.py"], "no.json: it cannot be read (No such file"),
        (["--network", "train.py", "train.py"], "it is not what stratagem check --json writes"),
        (["--network", "bytes", "train.py"], "--network bytes: it is not text."),
    ],
)
def test_misuse_is_one_sentence(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('this should not have run')")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x80")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "never called fit"),
        ("raise SystemExit(0)", "never called fit"),
        ("import sys; sys.exit('no data here')", "ended by itself (no data here)"),
        (
            "import torch, stratagem as sg\n"
            "class Greedy(torch.nn.Linear):\n"
            "    def forward(self, x): return super().forward(x) + torch.empty(1 << 50)\n"
            "m = sg.Model(Greedy(2, 2)); m.compile('sgd', 'mse')\n"
            "m.fit(torch.zeros(8, 2), torch.zeros(8, 2), batch_size=4)",
            "Greedy does not fit in this device's memory",
        ),
        (
            "import torch, stratagem as sg\n"
            "m = sg.Model(torch.nn.Linear(2, 2)); m.compile('sgd', 'mse')\n"
            "m.fit([])",
            "",
        ),
    ],
)
def test_scripts_that_cannot_be_planned(
    source: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--quick", "--json", "plan.json", "train.py"]) == 2
    error = capsys.readouterr().err
    last = error.strip().splitlines()[-1]
    assert said in last and last.startswith("stratagem plan: ") and "Traceback" not in error
    assert not (tmp_path / "plan.json").exists()


def test_errors_of_the_script_keep_their_traceback(script: Path) -> None:
    script.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", "train.py"])


@pytest.mark.timeout(180)
def test_validate_runs_what_fits(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains copies on one replica, a server with two workers, a pipeline, sharded replicas."""
    from stratagem.launch import validate
    from stratagem.plan.configuration import PIPELINE, SERVERS, SHARDED, Configuration

    stages = Configuration(PIPELINE, per_host=2, microbatches=4, schedule="1f1b")
    chosen = [Configuration(), Configuration(SERVERS, per_host=2, servers=1)]
    chosen += [Configuration(SHARDED, per_host=2), stages]
    monkeypatch.setattr(validate, "fitting", lambda plan: chosen)
    monkeypatch.setattr(validate, "_SECONDS", 0.05)
    words = ["plan", "--quick", "--hosts", "1", "--validate", "--rounds", "2"]
    assert cli.main([*words, "train.py", "--width", "8"]) == 0
    shown, said = capsys.readouterr()
    assert "predicted against measured" in shown and "median error" in shown
    assert "the median of 2" in " ".join(shown.split()) and "spread" in shown
    assert "ParameterServer, 1 server" in shown
    assert "round 1 of 2, 2 of 4: ParameterServer, 1 server, 2 on one host" in said
    assert "round 1 of 2 is done; about " in said
    assert said.count(" ms, measured ") == 8, "a run that is broken off has shown what it found"
    assert "Sharded, 2 on one host" in shown and "Pipeline, 1f1b, 4 microbatches" in shown


def test_validate_tells_a_restless_machine_from_a_wrong_plan() -> None:
    """The prediction for one device is its profile of a minute before."""
    from stratagem.launch.validate import ValidationRow, restless
    from stratagem.plan.configuration import MIRRORED, Configuration

    two = ValidationRow(Configuration(MIRRORED, per_host=2), 0.12, (0.2,))
    assert "65.00 ms now, 108.00 ms when it was profiled" in restless(
        [ValidationRow(Configuration(), 0.108, (0.065,)), two]
    )
    steady = ValidationRow(Configuration(), 0.108, (0.105, 0.110, 0.104))
    assert restless([steady, two]) == restless([two]) == ""
    odd = replace(two, rounds=(0.2, 0.21, 0.45))
    assert "in 1 of 2 rows the rounds differ by more than 15%" in restless([steady, odd])


def test_one_bad_moment_does_not_decide(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Configurations take turns, and the median of the rounds of each counts."""
    from stratagem.launch import validate
    from stratagem.launch.script import run_to_fit
    from stratagem.plan.configuration import Configuration
    from stratagem.plan.measure import rehearse

    trial = run_to_fit(["train.py", "--width", "8"])
    plan = choose(rehearse(trial, crowded=False), Hardware(per_host=2, cores=2))
    seen: list[int] = []
    steps = iter([0.02, 0.04, 0.02, 0.5, 0.021, 0.042])  # the second row has a bad second round

    def train(strategy: Strategy, batch: object, count: int) -> float:
        seen.append(strategy.num_replicas_in_sync)
        return strategy.num_replicas_in_sync * plan.profile.batch / next(steps)

    chosen = [Configuration(), Configuration(per_host=2)]
    one, two = validate.validate(plan, replace(trial, train=train), chosen)
    assert seen == [1, 2] * 3
    assert one.measured == pytest.approx(0.02) and two.measured == pytest.approx(0.042)
    assert one.spread == pytest.approx(0.05) and two.spread == pytest.approx(0.46 / 0.042)


KERAS = """
import keras
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(2)])
model.compile("adam", "mse", metrics=["mae"])
x = keras.random.normal((40, 8)).cpu().numpy()
model.fit(x, x[:, :2], batch_size=20, epochs=100000)
"""


def test_validate_runs_keras_too(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains copies of the model; the script's model is unchanged. Stages are measured, too."""
    keras = pytest.importorskip("keras")
    if keras.config.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    from stratagem.launch import validate
    from stratagem.launch.script import run_to_fit
    from stratagem.plan.configuration import PIPELINE, SHARDED, Configuration
    from stratagem.plan.measure import batch_of, rehearse
    from stratagem.plan.stage_profile import with_stages

    script.write_text(KERAS)
    trial = run_to_fit(["train.py"])
    before = trial.module.get_weights()
    plan = choose(rehearse(trial, crowded=False), Hardware(per_host=2, cores=2))
    monkeypatch.setattr(validate, "_SECONDS", 0.05)
    monkeypatch.setattr("stratagem.plan.stage_profile._SECONDS", 0.02)
    stages = Configuration(PIPELINE, per_host=2, microbatches=2, schedule="1f1b")
    chosen = [Configuration(), Configuration(per_host=2), stages]
    chosen += [Configuration(SHARDED, per_host=2)]
    assert set(chosen) <= set(plan.tried)
    rows = validate.validate(plan, trial, chosen, rounds=1)
    assert [row.configuration for row in rows] == chosen
    assert all(0 < row.measured < 10 for row in rows)
    assert all((a == b).all() for a, b in zip(before, trial.module.get_weights(), strict=True))
    assert int(trial.module.optimizer.iterations) == 0
    found = with_stages(plan.profile, trial, batch_of(trial, 20, torch.device("cpu")), [2])
    assert {t.pieces for t in found.stage_times} == {1, 2, 4} and not found.unpiped
    assert all(t.forward > 0 and t.backward > 0 for t in found.stage_times)
    assert "_stratagem" not in trial.module.__dict__ and "fit" not in trial.module.__dict__


def test_a_loop_cannot_be_validated(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(
        "import torch\nnet = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net(torch.ones(4, 2)).sum().backward()\noptimizer.step()\n"
    )
    assert cli.main(["plan", "--json", "plan.json", "--validate", "train.py"]) == 2
    shown = capsys.readouterr()
    last = shown.err.splitlines()[-1]
    assert last.startswith("stratagem plan: a loop of one's own cannot be run")
    assert "profiling" not in shown.err and not shown.out and not Path("plan.json").exists()
    assert cli.main(["plan", "--quick", "--hosts", "1", "train.py"]) == 0
    shown = capsys.readouterr()
    assert "assumed" not in shown.err, "one host has no link to assume anything of"
    said = " ".join(shown.out.split())
    assert all(name in said for name in ("PipelineStrategy and Mesh", "TensorParallelStrategy"))


def test_what_fits_is_of_this_machine() -> None:
    from stratagem.launch.validate import fitting

    machine = Hardware(hosts=8, per_host=64, cores=64)
    found = fitting(choose(profile(), machine, most=8))
    assert all(each.hosts == 1 and each.replicas <= cores() for each in found)
    tried = profile(crowd=((2, 0.01), (2 * cores(), 0.02)))  # more than there are processors
    found = fitting(choose(tried, machine, most=2 * cores()))
    assert max(each.replicas for each in found) == min(16, 2 * cores())
    sparse = fitting(choose(profile(sparse=(SparseTable(100, 64, 5.0),)), machine, most=8))
    assert all(each.strategy == "ParameterServerStrategy" for each in sparse)


def command(source: str, tmp_path: Path) -> subprocess.Popen[str]:
    """Run `stratagem plan` as a process."""
    (tmp_path / "train.py").write_text(source)
    words = [sys.executable, "-m", "stratagem", "plan", "--json", "plan.json", "train.py"]
    return subprocess.Popen(words, cwd=tmp_path, text=True, stderr=subprocess.PIPE)


def test_a_script_that_the_system_kills(tmp_path: Path) -> None:
    """The script is killed as by the kernel when memory runs out."""
    with command("import os; os.kill(os.getpid(), 9)", tmp_path) as process:
        error = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 2 and "more memory than there is" in error.splitlines()[-1]
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.slow
def test_a_signal_reaches_the_script(tmp_path: Path) -> None:
    source = (
        "import os, time, pathlib; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(99)"
    )
    with command(source, tmp_path) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
            assert process.poll() is None
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
