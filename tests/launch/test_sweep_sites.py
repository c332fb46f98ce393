"""Sweeps whose trials are jobs: on a real Slurm, over real sshd, and on a real Ray."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.clock import wait_for
from tests.hosts import ROOT, needs_hosts
from tests.launch.sites import finished, running, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: says where and when it ran, and trains, or waits for a file if it is told to
TRAIN = """
import argparse, json, os, pathlib, socket, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--hold", default="")
args = parser.parse_args()
trial = pathlib.Path(os.environ["STRATAGEM_TRIAL"])
def note(file, *words):
    with open(trial.parent / file, "a") as out:
        print(trial.name, *words, file=out, flush=True)
note("runs", socket.gethostname())
began = time.time()
if args.hold:  # no training: importing torch takes its time
    while not os.path.exists(args.hold):
        time.sleep(0.1)
    (trial / "metrics.jsonl").write_text(json.dumps({"loss": args.lr}) + "\\n")
    sys.exit()
import torch, stratagem as sg
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
with sg.MultiWorkerMirroredStrategy().scope():
    model = sg.Model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    model.compile(lambda params: torch.optim.Adam(params, lr=args.lr), "cross_entropy")
model.fit(x, y, batch_size=32, epochs=2, verbose=0)
print("trained with", args.lr)
note("spans", began, time.time())
"""


@pytest.fixture(scope="module", params=["slurm", "ray", "ssh"])
def there(request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    made = site(request.param, tmp_path_factory.mktemp(request.param))
    project = made.folder / "project"
    project.mkdir()
    (project / "train.py").write_text(TRAIN)
    if made.name == "ssh":
        hosts = made.options()
        settings = f'hosts = "{hosts[3]}"\nssh = "{hosts[5]}"\n'
        (project / "stratagem.toml").write_text(f"[submit]\n{settings}")
    yield made
    made.close()


def words(out: str, *more: str) -> list[str]:
    space = ["--lr", "1e-3..1e-1:log", "--metric", "loss:min", "--trials", "3", "--keep", "1"]
    return ["sweep", "train.py", *space, "--seed", "4", "--out", out, *more]


def table(there: Any, out: str) -> list[dict[str, str]]:
    with (there.folder / "project" / out / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def noted(there: Any, out: str, name: str) -> list[list[str]]:
    file = there.folder / "project" / out / name
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def ran(there: Any, out: str) -> Counter[str]:
    return Counter(line[0] for line in noted(there, out, "runs"))


@needs_hosts
def test_the_trials_of_a_sweep_on_this_machine(there: Any) -> None:
    """The jobs have the values, results and kept model of a sweep on this machine, bit for bit."""
    here = subprocess.Popen(
        [sys.executable, "-m", "stratagem", *words("here", "--slots", "1")],
        cwd=there.folder / "project",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    code, said = finished(here, 250)
    assert code == 0, said
    code, said = finished(there.start(*words("far", "--on", there.name, "--slots", "2")), 300)
    assert code == 0, said
    assert table(there, "here") == table(there, "far") and len(table(there, "far")) == 3
    assert len({row["--lr"] for row in table(there, "far")}) == 3
    project = there.folder / "project"
    kept = [
        sorted(path.parent.name for path in (project / out).glob("*/model.safetensors"))
        for out in ("here", "far")
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 1
    a, b = (load_file(project / out / kept[0][0] / "model.safetensors") for out in ("here", "far"))
    assert all(torch.equal(value, b[key]) for key, value in a.items())
    spans = [(float(line[1]), float(line[2])) for line in noted(there, "far", "spans")]
    assert all(sum(a <= start < b for a, b in spans) <= 2 for start, _ in spans)
    assert "trained with" in (project / "far" / "trial-000" / "log").read_text()
    if there.name == "ssh":  # Slurm and Ray find room for both on one node
        assert len({line[1] for line in noted(there, "far", "runs")}) > 1


@needs_hosts
def test_a_sweep_that_is_killed_finds_its_jobs_again(there: Any) -> None:
    go = there.folder / "go"
    more = ["--on", there.name, "--slots", "2", "--hold", str(go)]
    client = there.start(*words("killed", *more))
    wait_for(lambda: len(noted(there, "killed", "runs")) == 2, 120)
    client.kill()
    client.wait()
    again = there.start("sweep", "--resume", "--out", "killed", "--slots", "2")
    for _ in range(2):
        assert "begins in slot" in again.stdout.readline()
    assert len(noted(there, "killed", "runs")) == 2, "one of them was submitted again"
    go.write_text("")
    code, said = finished(again, 200)
    assert code == 0, said
    assert ran(there, "killed") == {f"trial-{i:03d}": 1 for i in range(3)}
    assert [row["state"] for row in table(there, "killed")] == ["done"] * 3


@needs_hosts
def test_ctrl_c_cancels_the_jobs_and_the_rest_is_run_later(there: Any) -> None:
    go = there.folder / "go2"
    more = ["--on", there.name, "--slots", "2", "--hold", str(go)]
    client = there.start(*words("ended", *more))
    wait_for(lambda: len(noted(there, "ended", "runs")) == 2, 120)
    below = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
    os.kill(int(below[0]) if below and there.name != "ray" else client.pid, signal.SIGINT)
    code, said = finished(client, 120)
    assert code == 130 and "go on with: stratagem sweep --resume --out ended" in said, said
    wait_for(lambda: not running("train.py"), 40)
    go.write_text("")
    code, said = finished(there.start("sweep", "--resume", "--out", "ended", "--slots", "2"), 200)
    assert code == 0, said
    assert [row["state"] for row in table(there, "ended")] == ["done"] * 3


NOTEBOOK = """
import sys, stratagem as sg
scale = 3.0
def train(lr):
    return {"score": lr * scale}
if __name__ == "__main__":
    asked = dict(metric="score:max", trials=3, seed=4)
    near = sg.sweep(train, {"lr": "1e-3..1e-1:log"}, out="near", slots=1, **asked)
    far = sg.sweep(train, {"lr": "1e-3..1e-1:log"}, out="told", slots=2, on=sys.argv[1], **asked)
    for a, b in zip(near.trials, far.trials, strict=True):
        assert (a.params, a.value) == (b.params, b.value) and b.value == b.params["lr"] * scale
        assert (b.folder / "job").exists() and not (a.folder / "job").exists()
    print("alike:", len(far.ranked))
"""


@needs_hosts
def test_a_function_of_a_notebook(there: Any) -> None:
    """`sg.sweep(on=...)`: the function is pickled into the sweep's folder."""
    (there.folder / "project" / "notebook.py").write_text(NOTEBOOK)
    code, said = finished(there.run_there([sys.executable, "notebook.py", there.name]), 300)
    assert code == 0 and "alike: 3" in said, said
