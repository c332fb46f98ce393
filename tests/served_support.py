"""Strategies with servers for tests to share, and the digits that they are to learn."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import stratagem as sg

RULES: dict[str, Any] = {
    "synchronous": sg.Synchronous(),
    "spares": sg.Synchronous(spares=1),
    "asynchronous": sg.Asynchronous(staleness=[sg.ScaleDown(), sg.Drop(older_than=16)]),
    "bounded": sg.Asynchronous(bound=2),
    "buffered": sg.Asynchronous(buffer=2),
}
PLACES = ("central", "1 ps", "2 ps")
_made: list[Any] = []


@cache
def strategy(place: str, rule: str, workers: int = 2) -> Any:
    """One strategy for all tests that need nothing else."""
    updates = RULES[rule]
    if place == "central":
        made: Any = sg.CentralStorageStrategy([f"cpu:{i}" for i in range(workers)], updates=updates)
    else:
        made = sg.ParameterServerStrategy(
            sg.LocalCluster(workers=workers, ps=int(place[0])), updates=updates
        )
    _made.append(made)
    made.run(_prepare)
    return made


def _prepare() -> None:
    """Importing takes workers longer on a busy machine than others wait for them at a start."""
    digits()


def close_all() -> None:
    for each in _made:
        each.close()
    _made.clear()
    strategy.cache_clear()


@cache
def handwriting() -> tuple[Any, Any]:
    """The digits of scikit-learn; each process reads them, and importing it takes longer."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None
    rows = np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test digits, shuffled once."""
    x, y = handwriting()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    pixels, labels = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    return pixels[:1400], labels[:1400], pixels[1400:], labels[1400:]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def apart(a: nn.Module, b: nn.Module) -> float:
    """The largest difference between two modules' parameters."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


#: what every such script begins with: how many workers there are, and whether it is the first
HEAD = """
import json, os
import torch
import stratagem as sg
from tests.served_support import apart, digits, net

torch.set_num_threads(1)
workers = int(os.environ["WORKERS"])
first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
x, y, _, _ = digits()
"""


def launch(script: str, workers: int, folder: Path, *options: str, code: int = 0) -> str:
    """What a script printed as all tasks of a cluster with a server, `HEAD` before it."""
    (folder / "train.py").write_text(HEAD + script)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stratagem",
            "run",
            "--workers",
            str(workers),
            "--ps",
            "1",
            *options,
            str(folder / "train.py"),
        ],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "KERAS_BACKEND": "torch",
            "WORKERS": str(workers),
        },
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
