"""A disk that is full is told as such, and what was saved before stays."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from tests.support import strategy

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

X, Y = torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 512 KiB."""
    if os.geteuid():
        pytest.skip("mounting a disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as problem:
            assert problem.errno == errno.ENOSPC


def check(disk: Path, act: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=f"make room in {disk}.*No space left on device") as told:
        act()
    assert told.value.errno == errno.ENOSPC


def model() -> sg.Model:
    found = sg.Model(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3)))
    found.compile("adam", "cross_entropy")
    return found


def test_save(disk: Path) -> None:
    net = model()
    net.fit(X, Y, batch_size=4, verbose=0)
    net.save(disk / "net")
    before = (disk / "net.safetensors").read_bytes()
    fill(disk)
    check(disk, lambda: net.save(disk / "net"))
    assert (disk / "net.safetensors").read_bytes() == before
    assert len(list(disk.iterdir())) == 3  # two files and the filling


def test_checkpoints_of_fit(disk: Path) -> None:
    fill(disk)
    check(disk, lambda: model().fit(X, Y, batch_size=4, verbose=0, checkpoint=disk))


@pytest.mark.parametrize("name", ["net.keras", "net.weights.h5"])
def test_keras(name: str, disk: Path) -> None:
    with strategy(1).scope():
        net: Any = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
        net.compile("adam", "mse")
    every = keras.callbacks.ModelCheckpoint(str(disk / name), save_weights_only=name.endswith("h5"))
    x, y = np.zeros((8, 64), "float32"), np.zeros((8, 32), "float32")
    net.fit(x, y, verbose=0, callbacks=[every])
    before = (disk / name).read_bytes()
    fill(disk)
    check(disk, lambda: net.fit(x, y, verbose=0, callbacks=[every]))
    assert (disk / name).read_bytes() == before
    (disk / "filling").unlink()
    net.fit(x, y, verbose=0, callbacks=[every])
    assert [each.name for each in disk.iterdir()] == [name]
