"""A folder of checkpoints survives the death of its writer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from stratagem.errors import UsageError
from stratagem.rules.checkpoint_schedule import CheckpointSchedule
from stratagem.state import checkpoint
from stratagem.state.checkpoint_folder import CheckpointFolder, Checkpoints, CheckpointWriter
from tests.clock import PATIENCE, SLOWER
from tests.state.ended_folders import loaded, save
from tests.state.ended_savings import trained

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(60)
def test_an_ended_saving_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.state.ended_folders", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50 * SLOWER)
    assert done.returncode == 0, done.stderr
    endings = [int(line) for line in done.stdout.split()]
    assert len(endings) == 4 and min(endings) >= 2 and endings[2] >= 20, endings


def test_files_load_without_us_and_are_kept_to_a_number(tmp_path: Path) -> None:
    for value in range(1, 6):
        save(tmp_path, float(value))
    assert sorted(os.listdir(tmp_path)) == ["000004-step-4", "000005-step-5"]
    newest = tmp_path / "000005-step-5"
    assert (load_file(newest / "model.safetensors")["weight"] == 5).all()
    state = torch.load(newest / "model.state.pt", weights_only=True)
    assert state["value"] == 5 and "optimizer" in state


def test_damage_is_seen_whatever_file_it_is_in(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.state.pt", "manifest.json"):
        save(tmp_path, 1.0)
        save(tmp_path, 2.0)
        newest = CheckpointFolder(tmp_path).names()[-1] / name
        content = bytearray(newest.read_bytes())
        content[len(content) * 2 // 3] ^= 16
        newest.write_bytes(content)
        assert loaded(tmp_path) == 1.0, name
    for path in CheckpointFolder(tmp_path).names():
        (path / "manifest.json").unlink()
    with pytest.raises(UsageError, match="none of the 2 checkpoints"):
        loaded(tmp_path)


def test_what_cannot_be_removed_is_told_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example an old checkpoint that is held open on a network disk."""

    def refuse(path: Path) -> None:
        raise OSError("busy")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    for value in (1.0, 2.0, 3.0, 4.0):
        save(tmp_path, value)
    assert loaded(tmp_path) == 4.0 and len(CheckpointFolder(tmp_path).names()) == 2
    assert "could not be removed: busy" in caplog.text


def test_training_waits_for_the_copy_alone(tmp_path: Path) -> None:
    """A saving is under way while the weights change, and the next one waits for it."""
    module, optimizer = trained(1.0)
    go = threading.Event()

    class Slow(CheckpointFolder):
        def write(self, *args: object) -> Path:
            assert go.wait(PATIENCE)
            return super().write(*args)  # type: ignore[arg-type]

    writer = CheckpointWriter(Slow(tmp_path, 2))
    writer.save(checkpoint.snapshot(module, optimizer, {"value": 1.0}, copy=True), {"step": 1})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
            optimizer.state[parameter]["momentum_buffer"].fill_(7.0)
    assert not list(tmp_path.iterdir())
    go.set()
    writer.wait()
    assert loaded(tmp_path) == 1.0


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"every": 0}, {"seconds": 0.0}, {"keep": 0}):
        with pytest.raises(UsageError):
            Checkpoints("run", **wrong)  # type: ignore[arg-type]


def test_the_schedule_looks_often_and_saves_seldom() -> None:
    """At 10 ms a step: two checks per second, and a checkpoint every 3 s or 1000 steps."""
    schedule = CheckpointSchedule(1000, 3.0, 0, 0.0)
    looks, saved, step = 0, [], 1
    while step < 3000:
        looks += 1
        now = step * (0.01 if step < 1500 else 0.001)
        if schedule.look(step, now if step < 1500 else 15 + (step - 1500) * 0.001):
            saved.append(step)
            schedule.saved(step, schedule.time)
        step = schedule.next()
    assert 25 < looks < 60
    assert saved[:4] == sorted(saved[:4]) and 300 <= saved[0] <= 360
    assert saved[-1] - saved[-2] <= 1000


def test_numbers_and_arrays_of_numpy_are_read_again(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.param_groups[0]["curve"] = np.ones(2)
    taken = checkpoint.snapshot(net, optimizer, {"history": {"f1": [np.float64(0.5)]}})
    path = CheckpointFolder(tmp_path).write(taken, {"step": 1})
    assert checkpoint.load(path / "model", net, optimizer) == {"history": {"f1": [0.5]}}
    assert optimizer.param_groups[0]["curve"].tolist() == [1.0, 1.0]


def test_a_full_disk_is_named_whoever_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"could not be saved in .*No space left"):
        save(tmp_path, 1.0)
