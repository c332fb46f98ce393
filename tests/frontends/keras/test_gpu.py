"""On a machine with a GPU: Keras' answers there, with one replica and with several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import keras
import pytest
import torch
from keras import layers

import stratagem as sg
from tests.keras_support import apart, digits, history_apart, train
from tests.ports import free_ports

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = str(Path(sg.__file__).parent.parent)


def net() -> Any:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )


def compile() -> dict[str, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(0.01, epsilon=1e-3)
    return {"optimizer": adam, "loss": loss, "metrics": ["accuracy"]}


@pytest.mark.parametrize("devices", [["/gpu:0"], ["cuda:0", "cpu:0"], ["cpu:0", "cpu:1"]])
def test_the_same_answer_as_plain_keras_on_the_gpu(devices: list[str]) -> None:
    x, y = digits(99)
    fit = {"x": x, "y": y, "batch_size": 16, "epochs": 2, "validation_split": 0.2}
    on_cpu = devices[0].startswith("cpu")  # whose dice are others than the GPU's
    with keras.device("cpu" if on_cpu else "gpu:0"):
        alone, expected = train(net, compile, fit)
    assert alone.weights[0].value.is_cuda != on_cpu
    strategy = sg.MirroredStrategy(devices, sync_batchnorm=True)
    try:
        spread, history = train(net, compile, fit, strategy)
        assert spread.weights[0].value.is_cuda != on_cpu
        assert apart(alone, spread) < 1e-5
        assert history_apart(expected, history) < 1e-5
        assert spread.predict(x, verbose=0).shape == (99, 3)
    finally:
        strategy.close()


WORKER = """
    import json, os, sys
    import keras, numpy as np, torch
    import stratagem as sg

    strategy = sg.MultiWorkerMirroredStrategy(devices=["cuda:0"], communication="ring")
    dice = np.random.default_rng(0)
    x, y = dice.normal(size=(83, 8)).astype("float32"), dice.integers(0, 3, 83)

    def trained(strategy=None):
        keras.utils.set_random_seed(1)
        import contextlib
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.layers.Dense(6, activation="tanh"),
                                      keras.layers.Dense(3)])
            model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                          optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        return model

    spread = trained(strategy)
    alone = trained()
    pairs = zip(alone.get_weights(), spread.get_weights())
    print(json.dumps({"apart": max(float(np.abs(a - b).max()) for a, b in pairs),
                      "cuda": spread.weights[0].value.is_cuda}))
"""


def test_two_workers_share_one_gpu() -> None:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    tasks = []
    for index in range(2):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
        environ = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "KERAS_BACKEND": "torch",
            "PYTHONPATH": path,
        }
        tasks.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(WORKER)],
                env=environ,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    for task in tasks:
        output, _ = task.communicate(timeout=150)
        assert task.returncode == 0, output
        said = json.loads(output.strip().splitlines()[-1])
        assert said["cuda"] and said["apart"] < 1e-5
