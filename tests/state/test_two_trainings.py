"""Two trainings that keep their checkpoints in one folder would write over each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from tests.sources import ROOT

SCRIPT = """
import sys, torch, stratagem as sg
class Wait(sg.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            print("trains", flush=True); sys.stdin.read()
model = sg.Model(torch.nn.Linear(2, 1)); model.compile("sgd", "mse")
model.fit(torch.ones(4, 2), torch.ones(4, 1), epochs=2, verbose=0, callbacks=[Wait()],
          checkpoint="run")
"""


def fit(folder: Path) -> None:
    model = sg.Model(nn.Linear(2, 1))
    model.compile("sgd", "mse")
    model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0, checkpoint=folder, resume=False)


@pytest.mark.timeout(90)
def test_the_second_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "trains\n"
        remedy = f"^give this training a checkpoint folder of its own.*process {first.pid} on"
        with pytest.raises(sg.UsageError, match=remedy):
            fit(tmp_path / "run")
    finally:
        first.kill()
        first.wait()
    fit(tmp_path / "run")
    assert not (tmp_path / "run" / ".training").exists()
