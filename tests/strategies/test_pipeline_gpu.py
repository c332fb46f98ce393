"""Pipelines with stages on a GPU and on CPUs give the result of one device.

One GPU is enough: the neighbours of its stage are CPU stages, or other tasks on the same GPU.
Messages go through the host's memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stratagem as sg
from tests.launch.run_processes import Launcher
from tests.strategies.stage_scripts import HEAD, TRAIN
from tests.strategies.test_pipeline import Knotted, adam, deep, doubles, fitted
from tests.support import by_hand, distance, moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("devices", [["cuda:0", "cpu:0"], ["cpu:0", "cuda:0", "cpu:1"]])
def test_stages_on_a_gpu_and_on_cpus(devices: Sequence[str]) -> None:
    """Any rows, skips, tied weights; parameters are on the device of their stage."""
    module, knotted = deep(), Knotted().double()
    dice = torch.Generator().manual_seed(0)
    words, targets = torch.randint(0, 11, (2, 23, 5), generator=dice)
    with sg.PipelineStrategy(devices, 3) as on:
        for rows in (1, 2, 6, 7, 15):
            x, y = doubles(rows)
            one = by_hand(module, adam, F.cross_entropy, x, y, batch=7)
            model = fitted(on, module, x, y, optimizer=adam, batch=7, metrics=["accuracy"])
            held = {p.device.type for p in model.module.parameters()}
            assert held == {torch.device(devices[0]).type}
            assert distance(one, model.module.cpu()) < 1e-12, rows
            assert moved(module, one)
        one = by_hand(knotted, adam, F.cross_entropy, words, targets, batch=9)
        found = fitted(on, knotted, words, targets, optimizer=adam, batch=9).module.cpu()
    assert distance(one, found) < 1e-12


def test_dropout_on_a_gpu_is_repeatable() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    module = module.append(nn.Linear(8, 4)).double()
    x, y = doubles(20)
    found = []
    with sg.PipelineStrategy(["cuda:0", "cpu:0"], 3, split=["2"]) as on:
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(fitted(on, module, x, y).module.cpu())
    assert distance(found[0], found[1]) < 1e-12 < 1e-6 < distance(found[0], found[2])


def test_two_stages_on_one_gpu(tmp_path: Path) -> None:
    """Each stage is a task; NCCL would refuse two ranks on one GPU."""
    launcher = Launcher(tmp_path)
    train = TRAIN.replace("fitted(", "fitted_here(").replace("one(x)", "one(x.cpu())")
    script = f"""{HEAD}
def fitted_here(*given, **options):
    model = fitted(*given, **options)
    assert next(model.module.parameters()).is_cuda
    return model
def distance(one, other, plain=distance):
    return plain(one, other.cpu())
strategy = sg.PipelineStrategy(["cuda:0"], 3){train}"""
    here = {"PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": "0"}
    try:
        child = launcher(script, "--workers", "2", **here)
        out, err = child.communicate(timeout=200)
    finally:
        launcher.end()
    assert child.returncode == 0, err
    assert out.count("exact True True 2") == 2, out + err


def test_rows_of_pipelines_on_a_gpu_and_on_cpus() -> None:
    module, (x, y) = deep(), doubles(22)
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=7)
    with sg.Mesh(2, 2, ["cuda:0", "cpu:0", "cpu:1", "cpu:2"], microbatches=2) as on:
        model = fitted(on, module, x, y, optimizer=adam, batch=7)
    assert distance(one, model.module.cpu()) < 1e-12


def test_under_one_limit_one_process_fails_and_two_on_the_same_gpu_train() -> None:
    """`make demo-large GPU=1`."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "large.py"), "--gpu"]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = done.stdout.split("two stages:")
    assert "Out of memory on cuda:0" in one and "PipelineStrategy(), which splits" in one
    assert "trained: loss" in two


def test_what_is_refused_on_gpus() -> None:
    with pytest.raises(sg.NotDistributable, match="columns run on CPUs so far"):
        sg.PipelineStrategy(["cuda:0", "cpu:0"], columns=4)
