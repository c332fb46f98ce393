"""What callbacks see and change in mid-fit, and the state after an interrupted fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import UsageError
from stratagem.frontends.callback_states import CallbackStates
from tests import spread
from tests.support import data, distance, mlp, strategy

OPS = ["shared_memory", "ring"]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module", params=OPS)
def two(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(2, cross_device_ops=request.param)
    yield made
    made.close()


def model_on(on: sg.Strategy, module: nn.Module, **options: Any) -> sg.Model:
    model = sg.Model(copy.deepcopy(module), on)
    model.compile(**{"optimizer": momentum, "loss": "cross_entropy", **options})
    return model


def both(
    two: sg.Strategy, train: Callable[[sg.Strategy], nn.Module], *, shared: bool = True
) -> float:
    """Return the distance between training on two replicas and on one; both must have trained."""
    one = strategy(1)
    try:
        expected, alone = spread.watched(lambda: train(one))
        found, shares = spread.watched(lambda: train(two), two)
        spread.assert_work(alone, shares, shared=shared)
        return distance(expected, found)
    finally:
        one.close()


def clamp(param: Tensor) -> None:
    param.data.clamp_(-0.2, 0.2)


def replace(param: Tensor) -> None:
    param.data = param.data * 0.5


@pytest.mark.parametrize("change", [clamp, replace])
@pytest.mark.parametrize("when", ["on_epoch_end", "on_train_batch_end"])
def test_weights_changed_behind_autograds_back(
    two: sg.Strategy, change: Callable[[Tensor], None], when: str
) -> None:
    x, y = data(50)

    def train(on: sg.Strategy) -> nn.Module:
        def act(*_: Any) -> None:
            for param in model.module.parameters():
                change(param)

        model = model_on(on, mlp())
        callback = sg.callbacks.LambdaCallback(**{when: act})
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, callbacks=[callback], verbose=0)
        return model.module

    assert both(two, train) < 1e-6


def test_a_buffer_changed_behind_autograds_back(two: sg.Strategy) -> None:
    x, y = data(50)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale  # type: ignore[no-any-return]

    def train(on: sg.Strategy) -> nn.Module:
        def halve(*_: Any) -> None:
            model.module.scale.data.mul_(0.5)

        model = model_on(on, Scaled())
        callback = sg.callbacks.LambdaCallback(on_epoch_end=halve)
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, callbacks=[callback], verbose=0)
        return model.module

    assert both(two, train) < 1e-6


def test_clipping_with_an_optimizer_of_some_parameters(two: sg.Strategy) -> None:
    """Gradients of parameters outside of the optimizer count in the norm, for one batch only."""
    x, y = data(50)

    def train(on: sg.Strategy) -> nn.Module:
        module = mlp()
        model = sg.Model(module, on)
        some = torch.optim.SGD(module[2].parameters(), lr=0.1)
        model.compile(some, "cross_entropy", clip_norm=0.3)
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
        return module

    assert both(two, train) < 1e-6
    module = mlp()
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
    for _ in range(3):
        for i in range(0, len(x), 16):
            module.zero_grad()
            nn.functional.cross_entropy(module(x[i : i + 16]), y[i : i + 16]).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            optimizer.step()
    assert distance(train(two), module) < 1e-6


def test_callbacks_find_the_whole_state_at_any_step(two: sg.Strategy, tmp_path: Path) -> None:
    """Both for a callback that saves, and for ModelCheckpoint in mid-epoch."""
    x, y = data(64)
    seen: list[tuple[float, int]] = []

    def look(*_: Any) -> None:
        states = model.optimizer.state_dict()["state"]
        seen.append((float(states[0]["step"]), len(states)))
        model.save(tmp_path / "own")

    model = model_on(two, mlp(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    callbacks = [
        sg.callbacks.LambdaCallback(on_train_batch_end=look),
        sg.callbacks.ModelCheckpoint(tmp_path / "every", every_steps=3),
    ]
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, callbacks=callbacks, verbose=0)
    assert seen == [(float(i + 1), 4) for i in range(8)]
    for name, made in (("own", 8), ("every", 6)):
        again = model_on(two, mlp(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
        again.load(tmp_path / name)
        assert float(again.optimizer.state_dict()["state"][3]["step"]) == made
        again.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
        plain = sg.Model(mlp(), strategy(1))
        plain.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy")
        plain.load(tmp_path / name)
        plain.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
        assert distance(again.module, plain.module) < 1e-6


class Boom(sg.callbacks.Callback):
    """Raises KeyboardInterrupt, or an error, at the third batch."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            raise self.error("enough")


@pytest.mark.parametrize(
    ("error", "form"),
    [
        (ValueError, momentum),
        (KeyboardInterrupt, torch.optim.Adam),
        (KeyboardInterrupt, torch.optim.Adagrad),
    ],
)
def test_after_a_fit_that_broke_off_the_next_one_goes_on(
    two: sg.Strategy, error: type[BaseException], form: Any
) -> None:
    """The next fit continues from the weights and optimizer state of the last step."""
    x, y = data(80)

    def train(on: sg.Strategy) -> nn.Module:
        model = model_on(on, mlp(), optimizer=form)
        with pytest.raises(error):
            model.fit(x, y, batch_size=16, shuffle=False, callbacks=[Boom(error)], verbose=0)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.module

    # after an error replicas are started anew
    assert both(two, train, shared=False) < 1e-6


def test_settings_that_add_to_the_state_in_mid_fit(two: sg.Strategy) -> None:
    x, y = data(64)

    def train(on: sg.Strategy) -> nn.Module:
        def warm(epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                model.optimizer.param_groups[0]["momentum"] = 0.9

        model = model_on(on, mlp(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        callback = sg.callbacks.LambdaCallback(on_epoch_begin=warm)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, callbacks=[callback], verbose=0)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.module

    assert both(two, train) < 1e-6


@pytest.mark.parametrize("op", OPS)
def test_synchronised_norms_are_usable_after_a_fit_that_broke_off(op: str, tmp_path: Path) -> None:
    x, y = data(64)
    made = strategy(2, cross_device_ops=op, sync_batchnorm=True)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = model_on(made, module)
    with pytest.raises(KeyboardInterrupt):
        callbacks = [Boom(KeyboardInterrupt)]
        model.fit(x, y, batch_size=16, callbacks=callbacks, verbose=0)
    torch.save(model.module, tmp_path / "module.pt")
    assert model.module(x).shape == (64, 4)
    model.fit(x, y, batch_size=16, verbose=0)
    assert model.predict(x).shape == (64, 4)
    made.close()


def test_momentum_in_another_memory_format(two: sg.Strategy) -> None:
    x, y = torch.randn(24, 3, 4, 4), torch.randint(0, 4, (24,))

    def train(on: sg.Strategy) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4))
        module: nn.Module = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = momentum(module.parameters())
        for each in (strategy(1), on):
            model = sg.Model(module, each)
            model.compile(optimizer, "cross_entropy")
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return module

    assert both(two, train) < 1e-6


class Noisy(nn.Module):
    """Draws random numbers for its rows, without using them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 0.0 * torch.randn_like(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["arrays", "loader"])
def test_what_a_model_draws_does_not_decide_the_order_of_data(two: sg.Strategy, kind: str) -> None:
    x, y = data(50)

    def train(on: sg.Strategy) -> nn.Module:
        torch.manual_seed(7)
        model = model_on(on, Noisy())
        rows: Any = (x, y)
        if kind == "loader":
            rows = (DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True),)
        options = {"batch_size": 16} if kind == "arrays" else {}
        for _ in range(2):
            model.fit(*rows, epochs=2, verbose=0, **options)
        return model.module

    assert both(two, train) < 1e-6


def test_dropout_differs_from_fit_to_fit_and_follows_the_seed(two: sg.Strategy) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            kept = self.drop(torch.ones(8))
            if set(kept.tolist()) != {1.0}:  # in the trial of rows nothing is drawn
                seen.append(kept.tolist())
            return self.layer(x)  # type: ignore[no-any-return]

    def masks(on: sg.Strategy) -> list[Any]:
        seen.clear()
        torch.manual_seed(3)
        model = model_on(on, Watched())
        for _ in range(2):
            model.fit(*data(16), batch_size=16, verbose=0)
        return list(seen)

    seen: list[Any] = []
    for on in (strategy(1), two):
        first = masks(on)
        assert len(first) == 2 and first[0] != first[1]
        assert masks(on) == first


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("when", ["on_epoch_end", "on_train_batch_end"])
def test_evaluate_in_a_callback_disturbs_nothing(count: int, when: str, two: sg.Strategy) -> None:
    """It evaluates the present model, and training is the same without it."""
    x, y = data(40)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    seen: list[tuple[float, float]] = []
    ends = []
    for watched in (False, True):
        torch.manual_seed(4)
        model = sg.Model(copy.deepcopy(net), two if count == 2 else None)
        model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy", ["accuracy"])

        def look(number: int, logs: Any = None, model: sg.Model = model) -> None:
            test = copy.deepcopy(model.module).eval()
            expected = nn.functional.cross_entropy(test(x), y).detach()
            seen.append((model.evaluate(x, y, batch_size=40)["loss"], float(expected)))
            assert torch.allclose(model.predict(x, verbose=0), test(x), atol=1e-6)

        callbacks = [sg.callbacks.LambdaCallback(**{when: look})] if watched else []
        fit = {"batch_size": 10, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(x, y, callbacks=callbacks, **fit).history
        ends.append((model.module, history["loss"], history["accuracy"]))
    assert len(seen) in (2, 8) and all(abs(a - b) < 1e-5 for a, b in seen)
    assert distance(ends[0][0], ends[1][0]) < 1e-6 and ends[0][1:] == ends[1][1:]


class Flag(sg.callbacks.Callback):
    """Counts trainings, and has a flag for the first batch of an epoch."""

    def __init__(self) -> None:
        self.fresh, self.trainings = False, 0

    def on_train_end(self, logs: Any = None) -> None:
        self.trainings += 1


def test_what_is_back_at_its_first_value_is_put_back() -> None:
    """A state equal to its first value is restored, too, after `on_epoch_begin` changed it."""
    states = CallbackStates([flag := Flag()])
    saved = states.saved()
    flag.fresh, flag.new = True, 1  # type: ignore[attr-defined]
    states.load(saved)
    assert not flag.fresh and not hasattr(flag, "new")


def test_what_was_learned_in_an_earlier_training_goes_to_another_process() -> None:
    first = Flag()
    CallbackStates([first])
    first.on_train_end()
    states = CallbackStates([first])  # of the next training
    assert states.saved()[0]["state"] == {}  # whoever resumes has been through the first
    heir = CallbackStates([other := Flag()])
    heir.load(list(states.by_number().values()))
    assert other.trainings == 1


class Average(sg.callbacks.Callback):
    """Has its own model and array, and references to the model and optimizer in training."""

    def __init__(self, trained: Any) -> None:
        self.average, self.total = nn.Linear(2, 1), np.zeros(3)
        self.first, self.optimizer, self.model = trained.module[0], trained.optimizer, trained


class Own(sg.callbacks.Callback):
    """Has its own `state_dict`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"].copy()


def test_models_and_arrays_of_a_callback_go_on_and_what_is_trained_is_apart(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 1))
    trained = SimpleNamespace(module=net, optimizer=torch.optim.SGD(net.parameters()))
    before, after = [(Average(trained), Own(np.zeros(3))) for _ in range(2)]
    states = CallbackStates(before)
    before[0].total += 2
    before[1].value += 3
    with torch.no_grad():
        for weight in (net[0].weight, before[0].average.weight):
            weight += 1
    assert set(states.saved()[0]["state"]) == {"average", "total"}
    torch.save(states.saved(), tmp_path / "saved")
    CallbackStates(after).load(torch.load(tmp_path / "saved", weights_only=True))
    assert torch.equal(after[0].average.weight, before[0].average.weight)
    assert isinstance(after[0].total, np.ndarray) and after[0].total.tolist() == [2.0] * 3
    assert after[1].value.tolist() == [3.0] * 3
    with pytest.raises(UsageError, match=r"Own.state_dict\(\) has 'value', a set, which"):
        CallbackStates([Own({1})])


class Unreadable(sg.callbacks.Callback):
    """Puts a value into the history that cannot be loaded again; may then fail."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.history.history["f1"] = [Fraction(1, 2)]
        if epoch and self.fails:
            raise KeyError("the user's own")


@pytest.mark.parametrize(("fails", "told"), [(False, "holds fractions"), (True, "own")])
def test_what_cannot_be_read_again_is_refused_and_hides_no_error(
    tmp_path: Path, fails: bool, told: str
) -> None:
    with sg.MirroredStrategy(["cpu"]).scope():
        model = sg.Model(nn.Linear(2, 1))
        model.compile("sgd", loss="mse")
    x, y = torch.zeros(4, 2), torch.zeros(4, 1)
    with pytest.raises(KeyError if fails else UsageError, match=told):
        model.fit(x, y, epochs=2, verbose=0, callbacks=[Unreadable(fails)], checkpoint=tmp_path)
    assert not list(tmp_path.glob("0*"))
