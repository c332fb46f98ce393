"""`fit` in a trial of a sweep writes metrics after each epoch, and the trained model at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import stratagem as sg
from stratagem.figures.trial_record import read_epochs
from stratagem.launch import cli
from tests.clock import SLOWER
from tests.support import distance, mlp, strategy

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATAGEM_TRIAL", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_of_torch(trial: Path, replicas: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    model = sg.Model(mlp(), strategy(replicas))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    for _ in range(2):
        history = model.fit(x, y, epochs=2, batch_size=16, validation_data=(x, y), verbose=0)
    lines = read_epochs(trial)
    assert [line["epoch"] for line in lines] == [1, 2, 1, 2]
    for name in ("loss", "val_loss", "val_accuracy"):
        assert [line[name] for line in lines[2:]] == history.history[name]
    plain = mlp()
    plain.load_state_dict(load_file(trial / "model.safetensors"))
    assert distance(plain, model.module) == 0.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_of_keras(trial: Path, replicas: int) -> None:
    import keras

    keras.utils.set_random_seed(1)
    x, y = np.random.rand(40, 8).astype("float32"), np.random.randint(0, 3, 40)
    with strategy(replicas).scope():
        layers = [keras.Input((8,)), keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential(layers)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    seen = []
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    fit = {"epochs": 2, "batch_size": 16, "validation_split": 0.2, "verbose": 0}
    history = model.fit(x, y, callbacks=[own], **fit).history
    lines = read_epochs(trial)
    assert seen == [0, 1] and [line["epoch"] for line in lines] == [1, 2]
    for name in ("loss", "val_loss", "val_accuracy"):
        assert [line[name] for line in lines] == history[name]
    loaded = keras.models.load_model(trial / "model.keras")
    assert np.array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_nothing_is_written_where_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = sg.Model(mlp(), strategy(1))
    model.compile("adam", "cross_entropy")
    model.fit(torch.randn(8, 6), torch.randint(0, 3, (8,)), verbose=0)
    assert list(tmp_path.iterdir()) == []


TRAIN = """
import argparse, torch
import stratagem as sg
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--units", type=int)
args = parser.parse_args()
torch.manual_seed(0)
x = torch.randn(120, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
layers = torch.nn.Linear(8, args.units), torch.nn.ReLU(), torch.nn.Linear(args.units, 2)
with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = sg.Model(torch.nn.Sequential(*layers))
    model.compile(lambda p: torch.optim.Adam(p, lr=args.lr), "cross_entropy")
model.fit(x, y, epochs=3, batch_size=32, validation_split=0.25, verbose=0)
"""


@pytest.mark.timeout(300)
def test_kept_models_are_those_of_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bit for bit; each trial has a strategy of two replicas."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(TRAIN)
    words = "sweep train.py --lr 1e-3..1e-1:log --units 4,8 --trials 4 --keep 3 --metric val_loss"
    assert cli.main([*words.split(), "--slots", "2", "--out", "out"]) == 0
    kept = sorted(path.parent for path in Path("out").glob("*/model.safetensors"))
    losses = {path: read_epochs(path)[-1]["val_loss"] for path in Path("out").glob("trial-*")}
    assert len(kept) == 3 and len(set(losses.values())) == 4
    assert kept == sorted(sorted(losses, key=lambda path: losses[path] or 0.0)[:3])
    for folder in kept:
        alone = tmp_path / f"alone-{folder.name}"
        alone.mkdir()
        monkeypatch.setenv("STRATAGEM_TRIAL", str(alone))
        flags = json.loads((folder / "args.json").read_text())["flags"]
        line = [word for each in flags.items() for word in each]
        subprocess.run([sys.executable, "train.py", *line], check=True, timeout=100 * SLOWER)
        mine, theirs = (load_file(each / "model.safetensors") for each in (folder, alone))
        assert mine.keys() == theirs.keys() and len(mine) == 4
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert read_epochs(folder)[-1]["val_loss"] == read_epochs(alone)[-1]["val_loss"]
