"""Callbacks by Keras' names: each is called or refused, and its changes count as on one device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import stratagem as sg
from tests.support import data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=["shared_memory", "ring"])
def two(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    with strategy(2, cross_device_ops=request.param) as made:
        yield made


def model_on(on: sg.Strategy | None, module: nn.Module | None = None, **options: Any) -> sg.Model:
    model = sg.Model(module or mlp(), on or strategy(1))
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **options})
    return model


class Thaw(sg.callbacks.Callback):
    """Trains the first layer in the second epoch only."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        next(self.model.module.children()).requires_grad_(epoch == 1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_layers_frozen_and_unfrozen_between_epochs(two: sg.Strategy, kind: Any) -> None:
    x, y = data(37)
    module = mlp()
    plain = copy.deepcopy(module)
    optimizer = kind(plain.parameters(), lr=0.05)
    for epoch in range(3):
        next(plain.children()).requires_grad_(epoch == 1)
        for start in range(0, 37, 8):
            optimizer.zero_grad()
            F.cross_entropy(plain(x[start : start + 8]), y[start : start + 8]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model = model_on(two, copy.deepcopy(module), optimizer=lambda p: kind(p, lr=0.05))
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[Thaw()])
    first = next(iter(module.state_dict()))
    assert not torch.equal(module.state_dict()[first], model.module.state_dict()[first])
    assert distance(model.module, plain) < 1e-5


class Swap(sg.callbacks.Callback):
    """Validates other weights than it trains, and records the called methods."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(f"batch {batch}")

    def on_test_begin(self, logs: Any = None) -> None:
        self.seen.append("test begins")
        self._kept = copy.deepcopy(self.model.module.state_dict())
        with torch.no_grad():
            for param in self.model.module.parameters():
                param.mul_(0.5)

    def on_test_end(self, logs: Any = None) -> None:
        self.seen.append(f"test ends, {sorted(logs)}")
        self.model.module.load_state_dict(self._kept)


@pytest.mark.parametrize("servers", [False, True])
def test_other_weights_in_a_validation(two: sg.Strategy, servers: bool) -> None:
    x, y = data(24)
    cluster, in_step = sg.LocalCluster(workers=2, ps=1), sg.Synchronous()
    where = sg.ParameterServerStrategy(cluster, updates=in_step) if servers else two
    swap, model = Swap(), model_on(where)
    before = copy.deepcopy(model.module)
    logs = model.fit(
        x, y, batch_size=8, shuffle=False, validation_data=(x, y), verbose=0, callbacks=[swap]
    ).history
    plain = copy.deepcopy(before)
    sgd = torch.optim.SGD(plain.parameters(), lr=model.optimizer.param_groups[0]["lr"])  # type: ignore[union-attr]
    for start in range(0, 24, 8):
        sgd.zero_grad()
        F.cross_entropy(plain(x[start : start + 8]), y[start : start + 8]).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    assert distance(model.module, plain) < 1e-5
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(0.5)
        half = float(F.cross_entropy(plain(x), y))
    assert abs(logs["val_loss"][0] - half) < 1e-5
    assert swap.seen[-2:] == ["test begins", "test ends, ['loss']"]
    assert "batch 0" in swap.seen
    if servers:
        where.close()


@pytest.mark.parametrize("name", ["on_train_epoch_end", "on_validation_batch_start"])
def test_a_method_that_would_never_be_called_is_refused(name: str) -> None:
    callback = sg.callbacks.Callback()
    setattr(callback, name, lambda *_: None)
    with pytest.raises(sg.UsageError, match=rf"{name} would never be called; here it is on_"):
        model_on(None).fit(*data(8), verbose=0, callbacks=[callback])
    with pytest.raises(sg.UsageError, match="there are on_train_begin"):
        sg.callbacks.LambdaCallback(**{name: lambda *_: None})


def test_an_optimizer_that_gets_other_parameters(two: sg.Strategy) -> None:
    model = model_on(two, optimizer=lambda p: torch.optim.SGD(list(p)[:2], lr=0.1))

    def add(*_: Any) -> None:
        last = list(model.module.parameters())[2:]
        model.optimizer.add_param_group({"params": last})  # type: ignore[union-attr]

    callback = sg.callbacks.LambdaCallback(on_epoch_begin=add)
    with pytest.raises(sg.NotDistributable, match="add_param_group"):
        model.fit(*data(24), batch_size=8, verbose=0, callbacks=[callback])


def test_another_model_is_evaluated_in_a_callback(two: sg.Strategy) -> None:
    """A callback may evaluate another model, with the strategy or without one."""
    x, y = data(24)
    teacher = mlp()
    expected = F.cross_entropy(teacher(x), y).item()
    found: list[float] = []

    def look(*_: Any) -> None:
        for where in (two, None):
            found.append(model_on(where, teacher).evaluate(x, y, verbose=0)["loss"])

    callback = sg.callbacks.LambdaCallback(on_epoch_end=look)
    model_on(two).fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    assert len(found) == 2 and max(abs(loss - expected) for loss in found) < 1e-5


# --- which way is better -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("val_loss", "min"),
        ("hamming", "min"),
        ("exactness", "max"),
        ("val_accuracy", "max"),
    ],
)
def test_which_way_is_better(monitor: str, mode: str) -> None:
    """The direction is known from the metric, or from its name."""
    stop = sg.callbacks.EarlyStopping(monitor, patience=1)
    model = model_on(
        None,
        metrics={
            "hamming": torchmetrics.HammingDistance(task="multiclass", num_classes=4),
            "exactness": torchmetrics.Accuracy(task="multiclass", num_classes=4),
        },
    )
    stop.set_model(model)
    stop.on_train_begin()
    stop.on_epoch_end(0, {monitor: 0.5})
    stop.on_epoch_end(1, {monitor: 0.4 if mode == "min" else 0.6})
    assert stop.wait == 0 and not model.stop_training
    stop.on_epoch_end(2, {monitor: 0.5})
    assert model.stop_training


@pytest.mark.parametrize("kind", ["EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint"])
@pytest.mark.parametrize("monitor", ["val_brier", "val_my_f1", "my_loss"])
def test_what_no_metric_says_is_asked_for(kind: str, monitor: str, tmp_path: Path) -> None:
    made: Any = getattr(sg.callbacks, kind)
    options: dict[str, Any] = {"monitor": monitor}
    if kind == "ModelCheckpoint":
        options |= {"path": tmp_path / "best", "save_best_only": True}
    with pytest.raises(sg.UsageError, match='say mode="min" or mode="max"'):
        model_on(None).fit(*data(8), verbose=0, callbacks=[made(**options)])


def test_a_plateau_begins_anew_with_each_fit() -> None:
    plateau = sg.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.1)
    low = model_on(None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(2):
        plateau.set_model(low)
        plateau.on_train_begin()
        plateau.on_epoch_end(0, {"loss": 5.0})  # the first of a fit is never worse
        plateau.on_epoch_end(1, {"loss": 4.0})
    assert low.optimizer.param_groups[0]["lr"] == 0.1  # type: ignore[union-attr]


@pytest.mark.parametrize("losses", [[5, 4, 4, 4, 4, 4], [5, 4.95, 4.9, 4.89, 4.88, 4.7, 4.7, 4.7]])
@pytest.mark.parametrize("cooldown", [0, 1, 3])
@pytest.mark.parametrize("patience", [1, 2])
def test_a_plateau_is_that_of_keras(losses: list[float], cooldown: int, patience: int) -> None:
    keras = pytest.importorskip("keras")
    given = {"patience": patience, "factor": 0.5, "min_delta": 0.06, "cooldown": cooldown}
    ours = sg.callbacks.ReduceLROnPlateau("loss", **given)
    model = model_on(None, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    theirs = keras.callbacks.ReduceLROnPlateau("loss", **given)
    other = keras.Sequential([keras.layers.Dense(1)])
    other.compile(keras.optimizers.SGD(1.0))
    for callback, on in ((ours, model), (theirs, other)):
        callback.set_model(on)
        callback.on_train_begin()
    for epoch, loss in enumerate(losses):
        ours.on_epoch_end(epoch, {"loss": loss})
        theirs.on_epoch_end(epoch, {"loss": loss})
        rate = model.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        assert rate == pytest.approx(float(other.optimizer.learning_rate.value))
    assert rate < 1.0


# --- files ----------------------------------------------------------------------------------------


def test_who_reads_while_the_chief_writes_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two files are renamed in turn, so that for a moment they are of different saves."""
    model = model_on(None)
    model.save(tmp_path / "m")
    old = (tmp_path / "m.state.pt").read_bytes()
    with torch.no_grad():
        for param in model.module.parameters():
            param.add_(1.0)
    model.save(tmp_path / "m")
    new = (tmp_path / "m.state.pt").read_bytes()
    (tmp_path / "m.state.pt").write_bytes(old)
    with pytest.raises(sg.UsageError, match="not saved together"):
        model_on(None).load(tmp_path / "m")
    other = model_on(None)
    monkeypatch.setattr(type(other.strategy), "is_chief", False)

    def finish() -> None:
        (tmp_path / "m.new").write_bytes(new)
        (tmp_path / "m.new").replace(tmp_path / "m.state.pt")

    threading.Timer(0.3, finish).start()
    other.load(tmp_path / "m")
    assert distance(other.module, model.module) == 0.0


def test_a_strategy_as_a_context() -> None:
    with strategy(2) as made:
        assert made.run(lambda: sg.current_replica().count) == [2, 2]
    assert made.run(lambda: sg.current_replica().index) == [0, 1]  # it can be used again
    made.close()
