"""Sweeps whose trials are jobs, with an engine that runs them on this machine; what is refused.

Real engines: test_sweep_sites.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.figures.trial_record import read_epochs
from stratagem.launch import cli, notebook_sweep, trial_places
from stratagem.launch.job_folder import JobFolder, JobRequest, JobState

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
args = parser.parse_args()
with open(os.environ["STRATAGEM_TRIAL"] + "/metrics.jsonl", "a") as file:
    print(json.dumps({"loss": args.lr}), file=file)
"""


class EngineHere:
    """An engine that runs jobs of one task as processes of this machine."""

    def __init__(self) -> None:
        self.sent: dict[Path, subprocess.Popen[bytes]] = {}
        self.names: list[str] = []
        self.most = 0

    def prepare(self, request: JobRequest) -> JobRequest:
        return request

    def check(self, request: JobRequest) -> JobRequest:
        return request

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        return " ".join(request.words)

    def send(self, request: JobRequest, job: JobFolder) -> str:
        job.sent("slurm", job.path.name, request)
        environ = {**os.environ, **request.environ}
        self.sent[job.path] = subprocess.Popen(
            [request.python, *request.words], cwd=request.folder, env=environ
        )
        self.names.append(request.name)
        self.most = max(self.most, sum(each.poll() is None for each in self.sent.values()))
        return job.path.name

    def state(self, job: JobFolder) -> JobState:
        code = self.sent[job.path].poll()
        return JobState("running") if code is None else JobState("ended", code)

    def cancel(self, job: JobFolder) -> None:
        self.sent[job.path].kill()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATAGEM_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(trial_places, "_ASK", 0.05)
    Path("train.py").write_text(TRAIN)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHere]:
    made = EngineHere()
    monkeypatch.setattr(trial_places, "engine", lambda name: made)
    yield made
    for process in made.sent.values():
        process.kill()
        process.wait()


def test_a_function_whose_trials_are_jobs(here: EngineHere) -> None:
    """The jobs have the trials of a sweep on this machine, a few at a time."""

    def my_train(lr: float, units: int) -> dict[str, float]:
        return {"score": lr * units}

    space = {"lr": "1e-3..1e-1:log", "units": [8, 16]}
    asked: dict[str, Any] = {"metric": "score:max", "trials": 3, "slots": 2}
    far = sg.sweep(my_train, space, out="far", on="slurm", **asked)
    assert here.names == ["my-train-000", "my-train-001", "my-train-002"] and here.most <= 2
    assert {Path((each.folder / "job").read_text()) for each in far.trials} == set(here.sent)
    near = sg.sweep(my_train, space, out="near", **asked)
    assert [(each.params, each.value) for each in far.trials] == [
        (each.params, each.value) for each in near.trials
    ]
    assert far.best.number == near.best.number and len(here.sent) == 3
    again = sg.sweep(my_train, space, out="far", on="slurm", resume=True, **asked)
    assert again.ranked == far.ranked and len(here.sent) == 3, "a trial was submitted twice"


def test_of_several_workers_one_writes_what_the_function_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cloudpickle

    written = b"[]\n" + cloudpickle.dumps(lambda lr: {"score": lr})
    (tmp_path / "train.function").write_bytes(written)
    monkeypatch.setenv("STRATAGEM_TRIAL", str(tmp_path))
    for index in (1, 0):
        spec = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
        notebook_sweep.main([str(tmp_path / "train.function"), "--lr", "0.5"])
        assert read_epochs(tmp_path) == ([] if index else [{"epoch": 1, "score": 0.5}])


# --- what cannot work -----------------------------------------------------------------------------

GOOD = "train.py --lr 1e-3..1e-1:log --metric loss"
ONE = "slurm, ssh, ray"


def test_one_sentence_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for words, sentence in (
        (f"--on slurm --slots 2 {GOOD}", "there is no sbatch on this machine: submit from a login"),
        (f"--on ray --slots 2 {GOOD}", "there is no `ray` on this machine: pip install 'ray["),
        (f"--on ssh --slots 2 {GOOD}", "which hosts? As in: --hosts node1,node2"),
        (f"--on ssh --hosts a --slots 2 {GOOD}", "there is no ssh on this machine"),
        (f"--on ssh --hosts a,a --slots 2 {GOOD}", "a is named twice among the hosts"),
        (f"--on pbs --slots 2 {GOOD}", "there is no engine 'pbs'; there are slurm, ssh, kube"),
        (f"--on kubernetes --slots 2 {GOOD}", f"which kubernetes has none of: --on {ONE}"),
        (f"--on slurm {GOOD}", "how many jobs at once on slurm? As in: --slots 4"),
        (f"--workers 2 {GOOD}", "where to? As in: --on slurm, with --workers"),
        (f"--on slurm --replicas-per-trial 2 --slots 2 {GOOD}", "a job on slurm has workers: say"),
        ("--on slurm --slots 2 train.py --lr 0.1 --metric loss", "there is nothing to try: give"),
        (f"--on slurm --slots 2 {GOOD} --depth 2..6", "train.py has no flag --depth"),
        ("--on slurm --slots 2 train.py --lr 1..2", "which metric decides? As in: --metric"),
        ("--on slurm --slots 2 none.py --lr 1..2 --metric loss", "there is no script 'none.py'"),
    ):
        assert cli.main(["sweep", "--out", "out", *words.split()]) == 2
        err = capsys.readouterr().err
        assert sentence in err and err.count("\n") == 1, err
    assert not Path("out").exists() and not Path("jobs").exists()


def test_ray_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("ray").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    assert cli.main(["sweep", "--on", "ray", "--slots", "2", *GOOD.split()]) == 2
    err = capsys.readouterr().err
    assert "there is no Ray at http://127.0.0.1:9" in err and err.count("\n") == 1


def test_fewer_hosts_than_trials_with_gpus_need(
    here: EngineHere, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--on ssh --hosts a,b --gpus-per-worker 1 --workers 2 --slots 2 {GOOD}"
    assert cli.main(["sweep", *words.split()]) == 2
    err = capsys.readouterr().err
    assert "no two have a host in common: --slots 1 at most on 2 hosts" in err and not here.sent


def test_a_metric_that_no_job_writes(here: EngineHere, capsys: pytest.CaptureFixture[str]) -> None:
    """The first job that ends shows it; the other jobs are cancelled, and the folder is free."""
    words = "--on slurm --slots 2 --out out train.py --lr 1..2"
    assert cli.main(["sweep", *words.split(), "--metric", "losss:min"]) == 2
    err = capsys.readouterr().err
    assert "train.py writes no losss; it writes loss; --metric loss?" in err
    assert err.count("\n") == 1 and len(here.sent) == 2
    assert all(process.wait(10) is not None for process in here.sent.values())
    assert cli.main(["sweep", *words.split(), "--metric", "loss", "--trials", "1"]) == 0


def test_one_sentence_of_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(lr: float) -> dict[str, float]:
        return {"score": lr}

    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    asked: dict[str, Any] = {"space": {"lr": "1..2"}, "metric": "score:max", "out": "out"}
    for more, sentence in (
        ({"on": "slurm", "slots": 2}, "there is no sbatch on this machine"),
        ({"on": "slurm"}, r"how many jobs at once on slurm\? As in: --slots 4, or slots=4"),
        ({"on": "pbs", "slots": 2}, "there is no engine 'pbs'"),
        ({"on": "vertex", "slots": 2}, f"which vertex has none of: --on {ONE}"),
        (
            {"on": "slurm", "slots": 2, "replicas_per_trial": 2},
            "workers and gpus_per_worker into stratagem.toml instead of replicas_per_trial",
        ),
    ):
        with pytest.raises(sg.UsageError, match=sentence):
            sg.sweep(train, **asked, **more)
    assert not Path("out").exists()
