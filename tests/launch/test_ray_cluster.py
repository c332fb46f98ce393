"""RayCluster and the driver of Ray's jobs with a fake Ray: real tasks, no cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.hosts import ROOT
from tests.support import by_hand

STAND_INS = ROOT / "tests" / "stand_ins"

TRAIN = """
import os, sys
import stratagem as sg

def train(name, fail):
    import torch
    from torch import nn
    strategy = sg.MultiWorkerMirroredStrategy()
    if fail and not strategy.is_chief:
        raise ValueError("no data")
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
    with strategy.scope():
        model = sg.Model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
        model.compile(lambda params: torch.optim.Adam(params, lr=0.01), "cross_entropy")
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    model.save(name)
    print("saved")
    return {"replicas": strategy.num_replicas_in_sync}

cluster = sg.RayCluster(workers=2)
"""


def run(code: str, *words: str, **environ: str) -> str:
    path = f"{STAND_INS}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(180)
def test_the_weights_of_one_device(tmp_path: Path) -> None:
    said = run(f"{TRAIN}\nprint(cluster.run(train, sys.argv[1], False))", str(tmp_path / "far"))
    assert "[{'replicas': 2}, {'replicas': 2}]" in said
    assert "[worker 0] saved" in said and "[worker 1] saved" in said
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    make: Any = lambda params: torch.optim.Adam(params, lr=0.01)  # noqa: E731
    alone = by_hand(net, make, nn.functional.cross_entropy, x, y, batch=32).state_dict()
    far = load_file(tmp_path / "far.safetensors")
    assert all(torch.allclose(far[name], value, atol=1e-6) for name, value in alone.items())
    assert not all(torch.equal(far[name], value) for name, value in net.state_dict().items())


@pytest.mark.timeout(180)
def test_a_worker_that_fails_is_named(tmp_path: Path) -> None:
    code = f"""{TRAIN}
try:
    cluster.run(train, sys.argv[1], True)
except sg.ReplicaFailed as error:
    print("failed:", error.who, "|", error)
"""
    said = run(code, str(tmp_path / "far"))
    assert "failed: worker 1 | worker 1 failed first" in said and "ValueError: no data" in said


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("sg.RayCluster(0)", "there is one worker at least"),
        ("sg.RayCluster(address='nowhere:1').run(print)", "there is no Ray cluster at nowhere:1"),
        ("sg.RayCluster().run(object)", "returned a object, and only numbers, text, lists"),
        ("sg.RayCluster().run(print, bytes(2_000_000))", "the function holds 2.0 MB"),
    ],
)
def test_refusals(code: str, sentence: str) -> None:
    text = f"import stratagem as sg\ntry:\n    {code}\nexcept sg.StratagemError as e: print(e)"
    assert sentence in run(text)


AGAIN = """
import json, os, sys
from stratagem.launch.engines import ray_driver
from stratagem.launch.job_folder import JobRequest
import ray
ray_driver._SETTLED = 0.5
words = ("-c", "import os, sys, time; n = sys.argv[1]; again = os.path.exists(n); "
         "open(n, 'a').close(); print('again', again); time.sleep(0 if again else 60)", sys.argv[1])
request = JobRequest("a", words, ".", "python", settings={"env": [], "restarts": int(sys.argv[2])})
driver = ray_driver.RayDriver(ray, request)
code = driver.run()
driver.close()
print("code", code)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_place_that_is_lost(tmp_path: Path, restarts: int) -> None:
    """The restarted task finds the files of the first run."""
    said = run(AGAIN, str(tmp_path / "mark"), str(restarts), STAND_IN_LOST="60")
    assert ("again True" in said) == bool(restarts)
    assert f"code {0 if restarts else 255}" in said and said.count(" again ") >= restarts
