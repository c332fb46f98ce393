"""Jobs for Vertex AI: what is refused; and real jobs by Google's client, on a loopback server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stratagem.errors import UsageError
from stratagem.launch.engines.vertex import _custom_job, check
from stratagem.launch.far_task import shared_secret
from stratagem.launch.job_request import JobRequest
from tests.hosts import ROOT
from tests.launch.sites import finished, running
from tests.ports import free_ports

SETTINGS = {"project": "p", "region": "r", "image": "i:1", "bucket": "gs://b/jobs"}


def request(**given: Any) -> JobRequest:
    settings = {**SETTINGS, **given.pop("settings", {})}
    return JobRequest("a", ("train.py", "--lr", "1"), "", "python", settings=settings, **given)


def pools(**given: Any) -> list[dict[str, Any]]:
    spec = _custom_job(request(**given), "a-1")
    check(spec)
    return list(spec["jobSpec"]["workerPoolSpecs"])


def test_pools() -> None:
    assert [pool["replicaCount"] for pool in pools()] == ["1"]
    assert [pool["replicaCount"] for pool in pools(workers=4)] == ["1", "3"]
    chief, others, ps, evaluator = pools(ps=2, evaluator=True)
    assert chief["replicaCount"] == "1" and others == {} and ps["replicaCount"] == "2"
    assert evaluator["replicaCount"] == "1"
    with_gpus = pools(workers=2, ps=1, gpus=2, settings={"accelerator": "NVIDIA_TESLA_T4"})
    assert [p["machineSpec"].get("acceleratorCount") for p in with_gpus] == [2, 2, None]
    (container,) = {json.dumps(pool["containerSpec"]) for pool in with_gpus}
    assert '"value": "/gcs/b/jobs/a-1"' in container


def _two_chiefs(spec: Any) -> None:
    spec[0]["replicaCount"] = "2"


@pytest.mark.parametrize(
    ("mangle", "said"),
    [
        (_two_chiefs, "pool 0 is the chief and has exactly one replica"),
        (lambda spec: spec.__setitem__(0, {}), "exactly one replica"),
        (lambda spec: spec.clear(), "exactly one replica"),
        (lambda spec: spec[1].pop("containerSpec"), "which image?"),
        (lambda spec: spec[1]["machineSpec"].clear(), "pool 1 has no machine type"),
        (lambda spec: spec[1]["machineSpec"].update(acceleratorCount=3), "1, 2, 4, 8 or 16 GPUs"),
        (lambda spec: spec.extend([spec[1]] * 2), "the last has one replica: the evaluator"),
        (lambda spec: spec.extend([spec[1]] * 3), "there are four pools"),
    ],
)
def test_what_the_api_would_refuse(mangle: Any, said: str) -> None:
    spec = _custom_job(request(workers=4), "a-1")
    mangle(spec["jobSpec"]["workerPoolSpecs"])
    with pytest.raises(UsageError, match=re.escape(said)):
        check(spec)


def test_the_secret_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "job" / "secret"
    with pytest.raises(UsageError, match="the chief has written no secret"):
        shared_secret(file, make=False, within=0)
    made = shared_secret(file, make=True)
    assert len(made) == 64 and shared_secret(file, make=True) == made
    assert shared_secret(file, make=False) == made


# --- with Google's client ------------------------------------------------------------------------

TRAIN = """
import sys, torch, stratagem as sg
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = sg.Model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    model.compile("adam", "cross_entropy")
model.fit(x, y, batch_size=32, epochs=3, verbose=0)
model.save(sys.argv[1])
print("replicas", strategy.num_replicas_in_sync, flush=True)
"""


class Site:
    """A loopback server, and a project beside it."""

    def __init__(self, folder: Path, packages: str) -> None:
        self.folder = folder
        (folder / "project").mkdir()
        (self.port,) = free_ports(1)
        path = f"{packages}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        self._environ = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "STRATAGEM_JOBS": str(folder / "jobs"),
        }
        self._server = self._begin("tests.vertex_server", str(self.port), str(folder))
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "serving\n"

    def _begin(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT if words[0].startswith("tests") else self.folder / "project",
            env=self._environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def script(self, text: str) -> None:
        (self.folder / "project" / "train.py").write_text(text)

    def say(self, *words: str) -> tuple[int, str]:
        return finished(self._begin("stratagem", *words), 120)

    def submit(self, *words: str, **more: str) -> tuple[int, str]:
        given = {"project": "p", "region": "r", "image": "i:1", "bucket": "gs://b/jobs", **more}
        options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if value]
        options.append(f"--vertex-endpoint=http://127.0.0.1:{self.port}")
        return self.say("submit", "--on", "vertex", *options, *words)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(20)


@pytest.fixture(scope="module")
def site(tmp_path_factory: Any) -> Iterator[Site]:
    packages = os.environ.get("STRATAGEM_TEST_VERTEX", "")
    if not packages:
        pytest.skip("pip install --target DIR google-cloud-aiplatform; STRATAGEM_TEST_VERTEX=DIR")
    made = Site(tmp_path_factory.mktemp("vertex"), packages)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_weights_of_the_local_run(site: Site) -> None:
    site.script(TRAIN)
    code, said = site.say("run", "--workers", "2", "train.py", "local")
    assert code == 0, said
    code, said = site.submit("--workers=2", "--follow", "train.py", "far")
    assert code == 0, said
    for name in ("workerpool0-0", "workerpool1-0"):
        assert (site.folder / "replicas" / f"{name}.log").read_text().endswith("replicas 2\n")
    files = (site.folder / "project" / f"{name}.safetensors" for name in ("local", "far"))
    local, far = (load_file(file) for file in files)
    assert all(torch.allclose(a, far[name], atol=1e-7) for name, a in local.items())
    (secret,) = (site.folder / "gcs").rglob("secret")
    assert secret.read_text() not in (site.folder / "received.json").read_text() + said
    assert "gcloud ai custom-jobs stream-logs 1001 --project=p --region=r" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_fails_is_named(site: Site) -> None:
    site.script(
        "import json, os, sys, time\n"
        "task = json.loads(os.environ['CLUSTER_SPEC'])['task']\n"
        "sys.exit(3) if task['type'] == 'workerpool1' else time.sleep(200)\n"
    )
    code, said = site.submit("--workers=2", "--follow", "train.py")
    assert code == 3, said
    assert "worker 1 failed first: exit code 3" in said.splitlines()[-2]
    assert "workerpool1-0 exited with a non-zero status of 3" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_shown_is_sent_and_cancelled(site: Site) -> None:
    site.script("import time\ntime.sleep(200)\n")
    options = ["--workers=2", "--time=2h", "--name=digits", "train.py", "--lr", "0.1"]
    code, shown = site.submit("--dry-run", *options)
    assert code == 0, shown
    (site.folder / "received.json").unlink(missing_ok=True)
    code, said = site.submit(*options)
    assert code == 0, said
    sent = re.sub(r"digits-[0-9a-f]{6}", "", (site.folder / "received.json").read_text())
    assert json.loads(sent) == json.loads(re.sub(r"digits-[0-9a-f]{6}", "", shown))
    logs, status, cancel = (
        line.strip().removeprefix("stratagem ").split()
        for line in said.partition("Next:")[2].strip().splitlines()
    )
    code, said = site.say(*status)
    assert code == 0 and said.count("running") == 3 and "workerpool1-0" in said, said
    code, said = site.say(*cancel)
    assert code == 0 and "is cancelled" in said, said
    assert site.say(*logs)[0] == 143
    assert cancel[1] in site.say("jobs")[1] and not running("train.py --lr 0.1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_refusals(site: Site) -> None:
    (site.folder / "received.json").unlink(missing_ok=True)
    for given, said in (
        ({"image": ""}, "which image.? As in"),
        ({"project": ""}, "which project.? As in: --project"),
        ({"gpus_per_worker": "1", "accelerator": "NVIDIA_H9000"}, "does not know this: .*H9000"),
        ({"gpus_per_worker": "1"}, "which GPUs.? As in"),
        ({"workers": "2", "bucket": ""}, "in a bucket: --bucket gs://"),
        ({"env": "HOME"}, "may read its variables: leave --env out"),
        ({"project": "forbidden"}, "Vertex AI refuses: you may not create jobs here"),
    ):
        code, answer = site.submit("train.py", **given)
        assert code == 2 and re.search(said, answer), answer
        assert len(answer.strip().splitlines()) <= 3, answer
    assert not (site.folder / "received.json").exists()
