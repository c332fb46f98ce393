"""`sg.Ensemble` answers by the mean of its members' probabilities, or by their votes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import stratagem as sg
from stratagem.frontends.ensemble import EnsembleReport
from stratagem.launch import cli
from tests.support import strategy

pytestmark = pytest.mark.timeout(120)


class Digits(nn.Module):
    """A module that any process can build from one flag."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, units), nn.ReLU(), nn.Linear(units, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y


def trained(units: int, data: tuple[Any, Any], replicas: int = 1) -> sg.Model:
    torch.manual_seed(units)
    model = sg.Model(Digits(units), strategy(replicas))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    model.fit(data[0][:1000], data[1][:1000], epochs=2, batch_size=100, verbose=0)
    return model


@pytest.fixture(scope="module")
def models(digits: tuple[Any, Any]) -> list[sg.Model]:
    return [trained(units, digits) for units in (8, 16, 24)]


def by_hand(models: list[sg.Model], x: Any) -> Any:
    with torch.no_grad():
        each = [torch.softmax(m.module(torch.as_tensor(x)), 1).numpy() for m in models]
    return np.stack(each)


def test_the_mean_is_numpys(models: list[sg.Model], digits: tuple[Any, Any]) -> None:
    x, y = digits[0][1000:], digits[1][1000:]
    each = by_hand(models, x)
    ensemble = sg.Ensemble(models)
    assert np.array_equal(ensemble.predict(x, batch_size=len(x)), each.mean(axis=0))
    report = ensemble.evaluate(x, torch.as_tensor(y), batch_size=len(x))
    right = (each.mean(axis=0).argmax(1) == y).mean()
    chances = each.mean(axis=0)[np.arange(len(y)), y]
    assert report.ensemble["accuracy"] == right
    assert report.ensemble["loss"] == pytest.approx(-np.log(chances.astype(float)).mean(), 1e-9)
    for member, model in zip(report.members, models, strict=True):
        own = model.evaluate(x, y, batch_size=len(x), verbose=0)
        assert member["accuracy"] == pytest.approx(own["accuracy"], abs=1e-6)
        assert member["loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert len({member["accuracy"] for member in report.members}) > 1  # they differ


def test_votes(models: list[sg.Model], digits: tuple[Any, Any]) -> None:
    x, y = digits[0][1000:], digits[1][1000:]
    votes = by_hand(models, x).argmax(axis=2)
    counts = np.stack([np.bincount(column, minlength=10) for column in votes.T])
    ensemble = sg.Ensemble(models, vote=True)
    np.testing.assert_allclose(ensemble.predict(x, batch_size=len(x)), counts / 3, atol=1e-7)
    report = ensemble.evaluate(x, y, batch_size=len(x))
    assert report.ensemble == {"accuracy": (counts.argmax(axis=1) == y).mean()}


def test_members_are_spread_over_replicas(digits: tuple[Any, Any]) -> None:
    """Members of two replicas give the answer of one device."""
    model = trained(8, digits, replicas=2)
    x = digits[0][1000:]
    got = sg.Ensemble([model, model]).predict(x, batch_size=64)
    np.testing.assert_allclose(got, by_hand([model], x)[0], atol=1e-6)


class Noting(nn.Module):
    """Touches a file for each process in which it runs."""

    def __init__(self, path: Path, inner: nn.Module) -> None:
        super().__init__()
        self.path, self.inner = path, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.path.with_suffix(f".{os.getpid()}").touch()
        found: torch.Tensor = self.inner(x)
        return found


class NotingLayer(keras.layers.Layer):  # type: ignore[misc]
    path: Path | None = None

    def call(self, inputs: Any) -> Any:
        if self.path is not None:
            self.path.with_suffix(f".{os.getpid()}").touch()
        return inputs


def test_members_on_several_devices(
    models: list[sg.Model], digits: tuple[Any, Any], tmp_path: Path
) -> None:
    """Each member runs on its device only, and the answer is that of one device."""
    x, y = digits[0][1000:], digits[1][1000:]
    own = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    layer = NotingLayer()
    of_layers = keras.Sequential([keras.Input((64,)), layer, keras.layers.Dense(10)])
    of_layers.compile("sgd", own)
    members = [*models, of_layers]
    one = sg.Ensemble(members)
    expected, report = one.predict(x, batch_size=100), one.evaluate(x, y, batch_size=100)
    layer.path = tmp_path / "3"
    noting: list[Any] = []
    for number, model in enumerate(models):
        noting.append(sg.Model(Noting(tmp_path / str(number), model.module), strategy(1)))
        noting[-1].compile("adam", "cross_entropy")
    devices = strategy(2)
    spread = sg.Ensemble([*noting, of_layers], strategy=devices)
    np.testing.assert_allclose(spread.predict(x, batch_size=100), expected, atol=1e-6)
    pids = devices.run(os.getpid)
    assert pids[0] == os.getpid() != pids[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n}.{pids[n % 2]}" for n in range(4)]
    got = spread.evaluate(x, y, batch_size=100)
    assert got.ensemble == pytest.approx(report.ensemble, abs=1e-6)
    for mine, theirs in zip(got.members, report.members, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)
    with pytest.raises(sg.UsageError, match="a DataLoader is no array"):
        spread.predict(torch.utils.data.DataLoader(list(x)))
    with pytest.raises(sg.UsageError, match="shared by the devices of one process"):
        sg.Ensemble(models, strategy=sg.PipelineStrategy(["cpu:0", "cpu:1"]))


def test_the_report_says_when_it_is_worse() -> None:
    members = [{"accuracy": 0.9, "loss": 0.3}, {"accuracy": 0.7, "loss": 0.9}]
    worse = EnsembleReport({"accuracy": 0.8, "loss": 0.5}, members)
    assert str(worse).endswith("The ensemble is worse than its best member.")
    assert "ensemble      0.8000  0.5000" in str(worse) and not worse.better
    better = EnsembleReport({"accuracy": 0.95, "loss": 0.2}, members)
    assert "worse" not in str(better) and better.better


def test_one_folder_of_plain_files(
    models: list[sg.Model], digits: tuple[Any, Any], tmp_path: Path
) -> None:
    x = digits[0][:50]
    saved = sg.Ensemble(models, vote=True)
    saved.save(tmp_path / "e")
    loaded = sg.Ensemble.load(tmp_path / "e", [Digits(8), Digits(16), Digits(24)])
    assert loaded.vote and np.array_equal(loaded.predict(x), saved.predict(x))
    assert json.loads((tmp_path / "e" / "ensemble.json").read_text())["members"] == [
        f"member-{n}.safetensors" for n in range(3)
    ]
    with pytest.raises(sg.UsageError, match=r"weights of 3 torch modules, and 1 modules are given"):
        sg.Ensemble.load(tmp_path / "e", [Digits(8)])
    with pytest.raises(sg.UsageError, match="is no ensemble's folder"):
        sg.Ensemble.load(tmp_path)


def of_keras(last: int, activation: str | None, loss: Any) -> Any:
    keras.utils.set_random_seed(last)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(last, activation=activation)])
    model.compile("sgd", loss)
    return model


def test_keras_and_torch_together(
    models: list[sg.Model], digits: tuple[Any, Any], tmp_path: Path
) -> None:
    x = digits[0][:60]
    own = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    logits = of_keras(10, None, own)
    plain = of_keras(10, "softmax", "sparse_categorical_crossentropy")
    ensemble = sg.Ensemble([logits, plain, models[0]])
    expected = [
        torch.softmax(torch.as_tensor(logits.predict(x, verbose=0)), 1).numpy(),
        plain.predict(x, verbose=0),
        by_hand(models[:1], x)[0],
    ]
    np.testing.assert_allclose(ensemble.predict(x), np.mean(expected, axis=0), atol=1e-6)
    ensemble.save(tmp_path)
    loaded = sg.Ensemble.load(tmp_path, [Digits(8)])
    assert np.array_equal(loaded.predict(x), ensemble.predict(x))


@pytest.mark.parametrize("columns", [(), (1,)])
def test_two_classes_by_one_number(columns: tuple[int, ...]) -> None:
    class Halves(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, 0] * self.scale).reshape(-1, *columns)

    x, y = torch.tensor([[2.0], [-1.0], [0.1], [-3.0]]), [1, 0, 1, 1]
    ensemble = sg.Ensemble([Halves(1.0), Halves(-0.5), Halves(2.0)], from_logits=True)
    each = [torch.sigmoid(x[:, 0] * scale).numpy() for scale in (1.0, -0.5, 2.0)]
    np.testing.assert_allclose(ensemble.predict(x).reshape(-1), np.mean(each, axis=0), atol=1e-6)
    report = ensemble.evaluate(x, y)
    assert report.ensemble["accuracy"] == 0.75
    assert [member["accuracy"] for member in report.members] == [0.75, 0.25, 0.75]
    ensemble.vote = True
    assert ensemble.predict(x).reshape(-1) == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3])


class Chances(nn.Module):
    """Outputs between 0 and 1 that are no class probabilities."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sg.Ensemble([]), "takes a list of models"),
        (lambda: sg.Ensemble([3]), "member 0 of the ensemble is a int"),
        (lambda: sg.Ensemble([nn.Linear(4, 3)]), "are the outputs of member 0 of the ensemble log"),
        (lambda: sg.Ensemble([nn.Linear(4, 3)], from_logits=False), "are no probabilities"),
        (lambda: sg.Ensemble([Chances()], from_logits=False), "are no probabilities"),
        (
            lambda: sg.Ensemble([nn.Linear(4, 3), nn.Linear(4, 2)], from_logits=True),
            "member 0 of the ensemble answers with 6 rows of 3 classes and member 1 with 6 rows",
        ),
        (lambda: sg.Ensemble([nn.Unflatten(1, (2, 2))], from_logits=True), "answers with 3 axes"),
    ],
)
def test_one_sentence(make: Callable[[], sg.Ensemble], sentence: str) -> None:
    with pytest.raises(sg.UsageError, match=sentence):
        make().predict(torch.randn(6, 4))


def test_targets_that_are_no_classes(models: list[sg.Model], digits: tuple[Any, Any]) -> None:
    ensemble, x = sg.Ensemble(models), digits[0][:4]
    with pytest.raises(sg.UsageError, match="no class numbers from 0 to 9"):
        ensemble.evaluate(x, [1, 2, 3, 10])
    with pytest.raises(sg.UsageError, match="4 examples and 3 targets"):
        ensemble.evaluate(x, [1, 2, 3])


def test_labels_that_do_not_exclude_each_other() -> None:
    model = sg.Model(nn.Linear(4, 3), strategy(1))
    model.compile("sgd", "binary_cross_entropy_with_logits")
    with pytest.raises(sg.UsageError, match="joins classes that exclude each other"):
        sg.Ensemble([model]).predict(torch.randn(6, 4))


# --- what a sweep has kept ------------------------------------------------------------------------


@pytest.fixture
def sweep(models: list[sg.Model], tmp_path: Path) -> Path:
    for number, model in enumerate(models[:2]):
        folder = tmp_path / "run" / f"trial-00{number}"
        folder.mkdir(parents=True)
        model.save(folder / "model")
        flags = {"--units": str(model.module.layers[0].out_features), "--lr": "0.1"}
        (folder / "args.json").write_text(json.dumps({"flags": flags}))
    (tmp_path / "run" / "trial-002").mkdir()  # not kept
    return tmp_path / "run"


def test_kept_models_of_torch(sweep: Path, models: list[sg.Model], digits: tuple[Any, Any]) -> None:
    x = digits[0][:50]
    made = sg.Ensemble.from_sweep(sweep, lambda flags: Digits(int(flags["units"])), False, True)
    assert np.array_equal(made.predict(x), sg.Ensemble(models[:2]).predict(x))
    with pytest.raises(sg.UsageError, match="have weights only, and a module to put them into"):
        sg.Ensemble.from_sweep(sweep)
    with pytest.raises(sg.UsageError, match="has no trial with a model"):
        sg.Ensemble.from_sweep(sweep / "trial-000")


BUILD = """
from torch import nn
class Net(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, units), nn.ReLU(), nn.Linear(units, 10))
    def forward(self, x):
        return self.layers(x)
def build(flags):
    return Net(int(flags["units"]))
"""


def test_the_command(
    sweep: Path,
    models: list[sg.Model],
    digits: tuple[Any, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(sweep.parent)
    x, y = digits[0][1000:], digits[1][1000:]
    np.savez("valid.npz", x=x, y=y)
    Path("net.py").write_text(BUILD)
    command = ["ensemble", "run", "--data", "valid.npz"]
    build = ["--build", "net.py:build", "--from-logits"]
    assert cli.main([*command, *build, "--out", "best", "--replicas", "2"]) == 0
    text = capsys.readouterr().out
    expected = sg.Ensemble(models[:2]).evaluate(x, y)
    assert text == f"{expected}\nsaved in best\n"
    assert len(sg.Ensemble.load("best", [Digits(8), Digits(16)])) == 2
    for words, sentence in (
        (command, "have weights only"),
        ([*command, "--build", "no.py:build"], "there is no file 'no.py'"),
        ([*command, "--build", "net.py:made"], "net.py has no function 'made'"),
        (["ensemble", "run", "--data", "none.npz"], "none.npz is no file of arrays x and y"),
    ):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert sentence in err and err.count("\n") == 1
