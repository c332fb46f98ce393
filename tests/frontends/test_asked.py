"""Keras' and Lightning's arguments: each works with every strategy, or is refused with a remedy."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import IN_STEP, data, distance, in_step, mlp, moved, strategy

pytestmark = pytest.mark.timeout(60)

X, Y = data(37)
VAL_X, VAL_Y = data(21, seed=1)
BATCH = 8


@pytest.fixture(scope="module", params=IN_STEP)
def where(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    with in_step(request.param, 2) as made:
        yield made


@pytest.fixture(scope="module")
def one() -> sg.Strategy:
    return strategy(1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def model_on(where: sg.Strategy, module: nn.Module | None = None) -> sg.Model:
    model = sg.Model(module or mlp(), where)
    model.compile(optimizer=sgd, loss="cross_entropy")
    return model


def epochs_by_hand(count: int) -> list[nn.Module]:
    """Return the model after each epoch."""
    module, after = mlp(), []
    optimizer = sgd(module.parameters())
    for _ in range(count):
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        after.append(copy.deepcopy(module))
    return after


def loss_of(module: nn.Module, x: Tensor = VAL_X, y: Tensor = VAL_Y) -> float:
    return F.cross_entropy(module(x), y).item()


def fit(model: sg.Model, **options: Any) -> dict[str, list[float]]:
    ordinary: dict[str, Any] = {
        "batch_size": BATCH,
        "shuffle": False,
        "verbose": 0,
        "validation_data": (VAL_X, VAL_Y),
    }
    return model.fit(X, Y, **(ordinary | options)).history


class Logs(sg.callbacks.Callback):
    def __init__(self) -> None:
        self.validated: list[int] = []
        self.tests = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if "val_loss" in logs:
            self.validated.append(epoch + 1)

    def on_test_begin(self, logs: Any = None) -> None:
        self.tests += 1


@pytest.mark.parametrize(("often", "validated"), [(2, [2, 4]), ([1, 4], [1, 4]), ((5,), [])])
def test_validation_freq(where: sg.Strategy, often: Any, validated: list[int]) -> None:
    logs, model = Logs(), model_on(where)
    history = fit(model, epochs=4, validation_freq=often, callbacks=[logs])
    after = epochs_by_hand(4)
    assert logs.validated == validated and logs.tests == len(validated)
    assert len(history["loss"]) == 4
    expected = [loss_of(after[epoch - 1]) for epoch in validated]
    assert history.get("val_loss", []) == pytest.approx(expected, abs=1e-5)
    assert moved(mlp(), after[-1]) and distance(model.module, after[-1]) < 1e-5


def test_initial_epoch_counts_for_validation_freq(where: sg.Strategy) -> None:
    logs, model = Logs(), model_on(where)
    fit(model, epochs=5, initial_epoch=2, validation_freq=2, callbacks=logs)
    assert logs.validated == [4]
    assert distance(model.module, epochs_by_hand(3)[-1]) < 1e-5


def test_those_who_look_for_the_best_skip_epochs_without_validation(
    where: sg.Strategy, tmp_path: Path
) -> None:
    """The validation has wrong classes, so that its loss grows with every epoch."""
    stop = sg.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    plateau = sg.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    best = sg.callbacks.ModelCheckpoint(tmp_path / "best", save_best_only=True)
    each = sg.callbacks.ModelCheckpoint(tmp_path / "{epoch}-{val_loss:.1f}")
    model = model_on(where)
    with torch.no_grad():
        for param in model.module.parameters():
            param.zero_()
    wrong = (X, (Y + 1) % 4)
    options: dict[str, Any] = {"validation_data": wrong, "validation_freq": 2, "epochs": 9}
    history = fit(model, callbacks=[stop, plateau, best, each], **options)
    values = history["val_loss"]
    assert len(values) == 3 and values == sorted(values) and values[0] < values[-1]
    assert stop.stopped_epoch == 5  # validated after epochs 2, 4 and 6
    assert model.optimizer is not None
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert [name.partition("-")[0] for name in names] == ["2", "4", "6", "best.safetensors"]
    found = model_on(strategy(1))
    found.load(tmp_path / "best")
    assert distance(found.module, model.module) < 1e-6  # restored


def test_the_best_is_restored_after_a_last_epoch_without_validation(one: sg.Strategy) -> None:
    stop = sg.callbacks.EarlyStopping(patience=9, restore_best_weights=True)
    model = model_on(one)
    fit(model, epochs=3, validation_freq=[2], callbacks=stop)
    assert distance(model.module, epochs_by_hand(2)[-1]) < 1e-6


def test_a_log_that_is_never_there_is_named(one: sg.Strategy, tmp_path: Path) -> None:
    saver = sg.callbacks.ModelCheckpoint(tmp_path / "{val_accuracy:.2f}")
    with pytest.raises(sg.UsageError, match="names 'val_accuracy', which is not among the logs"):
        fit(model_on(one), epochs=2, validation_freq=2, callbacks=[saver])
    stop = sg.callbacks.EarlyStopping("val_accuracy")
    with pytest.raises(sg.UsageError, match='"val_accuracy" is not among the logs'):
        fit(model_on(one), epochs=2, validation_freq=2, callbacks=[stop])


def test_validation_steps_and_batch_size(where: sg.Strategy) -> None:
    sizes: list[Any] = []
    note = sg.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: sizes.append(batch))
    options: dict[str, Any] = {"validation_batch_size": 5, "validation_steps": 3}
    history = fit(model_on(where), callbacks=[note], **options)
    after = epochs_by_hand(1)[0]
    assert sizes == [0, 1, 2]
    assert history["val_loss"] == pytest.approx([loss_of(after, VAL_X[:15], VAL_Y[:15])], abs=1e-5)
    loader = DataLoader(TensorDataset(VAL_X, VAL_Y), batch_size=4)
    history = fit(model_on(where), validation_data=loader, validation_steps=2)
    assert history["val_loss"] == pytest.approx([loss_of(after, VAL_X[:8], VAL_Y[:8])], abs=1e-5)
    with pytest.raises(sg.UsageError, match="batch_size=5 cannot be followed"):
        fit(model_on(where), validation_data=loader, validation_batch_size=5)


def test_a_generator_goes_on_at_the_next_validation(where: sg.Strategy) -> None:
    def batches() -> Iterator[Any]:
        while True:
            yield from zip(VAL_X.split(7), VAL_Y.split(7), strict=True)

    options: dict[str, Any] = {"validation_data": batches(), "validation_steps": 2}
    history = fit(model_on(where), epochs=2, **options)
    first, second = epochs_by_hand(2)
    x, y = torch.cat([VAL_X[14:], VAL_X[:7]]), torch.cat([VAL_Y[14:], VAL_Y[:7]])
    expected = [loss_of(first, VAL_X[:14], VAL_Y[:14]), loss_of(second, x, y)]
    assert history["val_loss"] == pytest.approx(expected, abs=1e-5)


def test_evaluate_and_predict(where: sg.Strategy) -> None:
    model, plain = model_on(where), mlp()
    weight = torch.rand(37)
    found = model.evaluate(X, Y, sample_weight=weight, batch_size=BATCH, verbose=0)["loss"]
    each = F.cross_entropy(plain(X), Y, reduction="none")
    assert found == pytest.approx((each * weight).mean().item(), abs=1e-5)
    named = model.evaluate(X, Y, batch_size=BATCH, steps=2, return_dict=True, verbose=0)
    assert named == {"loss": pytest.approx(loss_of(plain, X[:16], Y[:16]), abs=1e-5)}
    loader = DataLoader(TensorDataset(X, Y), batch_size=BATCH)  # targets are left out
    for steps, rows in ((None, 37), (3, 24)):
        outputs = model.predict(loader, steps=steps, callbacks=None, verbose=0)
        assert torch.allclose(outputs, plain(X[:rows]), atol=1e-6)


NO_SUCH: list[tuple[str, dict[str, Any], str]] = [
    ("fit", {"batchsize": 8}, "fit has no batchsize: perhaps it is batch_size."),
    ("fit", {"max_epochs": 8}, "fit has no max_epochs: it is epochs."),
    ("fit", {"workers": 4}, "fit has no workers: a DataLoader reads with workers"),
    ("fit", {"nonsense": 4}, "fit has no nonsense: there are x, y, batch_size, epochs, "),
    ("evaluate", {"return_dic": True}, "evaluate has no return_dic: perhaps it is return_dict."),
    ("evaluate", {"return_dict": False}, "that is list(model.evaluate(...).values())."),
    ("predict", {"y": Y}, "predict has no y: there are x, batch_size, steps"),
    ("compile", {"loss_weights": [1]}, "compile has no loss_weights: add up the parts"),
    ("compile", {"lr": 0.1}, "compile has no lr: it is the optimizer's"),
    ("fit", {"epochs": 2.5}, "epochs is 2.5; it must be a whole number."),
    ("fit", {"initial_epoch": -1}, "initial_epoch is -1; it must be 0 or more."),
    ("fit", {"validation_freq": 0}, "validation_freq is 0; it must be 1 or more."),
    ("fit", {"validation_freq": [0, 2]}, "an epoch of validation_freq is 0; it must be 1"),
    ("fit", {"validation_freq": "2"}, "validation_freq is '2'; it must be a whole number."),
    ("fit", {"validation_steps": 0}, "validation_steps is 0; it must be 1 or more."),
    ("evaluate", {"steps": 0}, "steps is 0; it must be 1 or more."),
    ("predict", {"steps": True}, "steps is True; it must be a whole number."),
]


@pytest.mark.parametrize(("verb", "options", "words"), NO_SUCH)
def test_what_there_is_not(one: sg.Strategy, verb: str, options: Any, words: str) -> None:
    model = model_on(one)
    given = () if verb == "compile" else (X,) if verb == "predict" else (X, Y)
    with pytest.raises(sg.UsageError) as raised:
        getattr(model, verb)(*given, **options)
    assert words in str(raised.value)


def test_places_and_names(one: sg.Strategy) -> None:
    """The third positional argument is Keras' batch size; here it must be named."""
    with pytest.raises(sg.UsageError, match="fit takes x and y by their place, and 4 were given"):
        model_on(one).fit(X, Y, 32, 10)  # type: ignore[call-arg]
    assert "validation_freq" in inspect.signature(sg.Model.fit).parameters
