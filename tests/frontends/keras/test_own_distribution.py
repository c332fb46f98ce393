"""Beside Keras' own data parallelism (3.16 and newer) a scope is exact, or refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import stratagem as sg
from tests.keras_support import strategy

X = np.linspace(-1, 1, 13 * 4, dtype="float32").reshape(13, 4)
Y = (X @ np.arange(4, dtype="float32")[:, None]) ** 2

SCRIPT = """
import sys
import keras, numpy as np, torch.distributed as dist
from contextlib import nullcontext
import stratagem as sg

grouped, scoped = sys.argv[1] == "grouped", sys.argv[2] == "scoped"
if grouped:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
X = np.linspace(-1, 1, 13 * 4, dtype="float32").reshape(13, 4)
Y = (X @ np.arange(4, dtype="float32")[:, None]) ** 2
keras.utils.set_random_seed(3)
with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope() if scoped else nullcontext():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
fitted = model.fit(X, Y, batch_size=5, epochs=3, verbose=0).history
print(model.get_weights()[0].ravel().tolist() + fitted["loss"] + fitted["mae"])
print(type(getattr(model, "ddp_model", None)).__name__)
"""


@pytest.mark.timeout(110)
def test_a_process_group_of_the_script_changes_nothing(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[list[float], str]:
        place = tmp_path / "script.py"
        place.write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, place, *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "KERAS_BACKEND": "torch"},
        )
        assert not done.returncode, done.stderr[-2000:]
        numbers, wrapper = done.stdout.splitlines()[-2:]
        return eval(numbers), wrapper

    one, ours = run("alone", "plain")[0], run("grouped", "scoped")
    assert ours == (pytest.approx(one, rel=1e-5), "NoneType")


@pytest.fixture
def net() -> Iterator[Any]:
    yield keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    keras.distribution.set_distribution(None)


def distribute() -> None:
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], devices=["cpu:0"])
    theirs = keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False)
    keras.distribution.set_distribution(theirs)


def test_keras_distribution_and_a_scope_are_refused(net: Any) -> None:
    distribute()
    remedy = "^leave out keras.distribution.set_distribution"
    with strategy(2).scope(), pytest.raises(sg.NotDistributable, match=remedy):
        net.compile("sgd", "mse")


def test_keras_distribution_that_is_set_later_is_refused(net: Any) -> None:
    with strategy(2).scope():
        net.compile("sgd", "mse")
    distribute()
    with pytest.raises(sg.NotDistributable, match="cut each batch twice"):
        net.fit(X, Y, batch_size=5, verbose=0)
