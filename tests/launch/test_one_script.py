"""One script and one seed: the same weights from Python alone and from every engine, in one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.hosts import ROOT, needs_hosts
from tests.launch.sites import finished, site

TRAIN = """
import sys
import torch
from torch import nn
import stratagem as sg

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
start = [p.clone() for p in net.parameters()]
strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = sg.Model(net)
    model.compile("adam", "cross_entropy")
model.fit(x, y, batch_size=32, epochs=3, verbose=0)
moved = max(float((a - b).abs().max()) for a, b in zip(start, model.module.parameters()))
model.save(sys.argv[1])
print("replicas", strategy.num_replicas_in_sync, "moved", moved > 1e-3, flush=True)
"""
ENGINES = ("slurm", "ssh", "ray", "kubernetes", "vertex")


def here(project: Path, *words: str) -> str:
    """Run a command on this machine and return its output."""
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    code, said = finished(child)
    assert code == 0, said
    return said


def on_engine(name: str, folder: Path, model: Path) -> None:
    made: Any = site(name, folder)
    try:
        (folder / "project").mkdir(exist_ok=True)
        (folder / "project" / "train.py").write_text(TRAIN)
        words = ["submit", *made.options(), "--workers", "2", "--follow", "train.py", str(model)]
        code, said = finished(made.start(*words), 200)
        assert code == 0, said
        if "install google-cloud-logging" not in said:
            for task in ("worker 0", "worker 1"):
                assert said.count(f"[{task}] replicas 2 moved True") == 1, said
    finally:
        made.close()


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_weights_everywhere(
    tmp_path_factory: pytest.TempPathFactory, subtests: pytest.Subtests
) -> None:
    """Two workers agree bit for bit on all engines.

    Python alone is one replica, which sums a batch at once, not in two halves: 1e-12 of doubles.
    """
    folder = tmp_path_factory.mktemp("here")
    (folder / "train.py").write_text(TRAIN)
    assert "replicas 1 moved True" in here(folder, "train.py", "alone")
    said = here(folder, "-m", "stratagem", "run", "--workers", "2", "train.py", "run")
    assert said.count("replicas 2 moved True") == 2, said
    alone, run = (load_file(folder / f"{name}.safetensors") for name in ("alone", "run"))
    assert alone.keys() == run.keys() and len(run) == 4
    for key, value in run.items():
        assert value.dtype == torch.float64 and float((alone[key] - value).abs().max()) < 1e-12
    for name in ENGINES:
        with subtests.test(name):
            on_engine(name, tmp_path_factory.mktemp(name), folder / name)
            far = load_file(folder / f"{name}.safetensors")
            assert far.keys() == run.keys()
            assert all(torch.equal(value, far[key]) for key, value in run.items())
