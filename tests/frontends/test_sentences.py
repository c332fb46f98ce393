"""What cannot work is refused with a remedy; what Keras accepts is accepted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import by_hand, data, distance, mlp

pytestmark = pytest.mark.timeout(60)


# --- no targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", ["cross_entropy", "mse", nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum")]
)
def test_a_loss_without_targets(some: sg.Strategy, loss: Any) -> None:
    x, _ = data(20)
    model = sg.Model(mlp(), some)
    model.compile("sgd", loss, ["accuracy"])
    sentence = r"the loss needs targets.*give x and y.*takes None"
    for given in (x, TensorDataset(x), DataLoader(TensorDataset(x), 5)):
        with pytest.raises(sg.UsageError, match=sentence):
            model.fit(given, verbose=0)
        with pytest.raises(sg.UsageError, match=sentence):
            model.evaluate(given, verbose=0)


def test_a_loss_of_ones_own_may_take_none(some: sg.Strategy) -> None:
    x, _ = data(20)
    model = sg.Model(mlp(), some)
    model.compile("sgd", lambda output, target: output.square().mean(1))
    assert model.fit(x, verbose=0).history["loss"] == pytest.approx(
        [float(mlp()(x).detach().square().mean())], abs=1e-6
    )
    model.compile("sgd", lambda output, target: output.square().mean(1), ["accuracy"])
    with pytest.raises(sg.UsageError, match=r'"accuracy" compares.*there are no targets'):
        model.fit(x, verbose=0)


# --- several outputs -----------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = mlp(), mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


@pytest.mark.parametrize("name", ["accuracy", "mae"])
def test_a_metric_by_name_of_several_outputs(some: sg.Strategy, name: str) -> None:
    x, y = data(20)
    model = sg.Model(Two(), some)
    model.compile("sgd", lambda output, target: F.cross_entropy(output[0], target), [name])
    with pytest.raises(sg.UsageError, match=rf'"{name}" compares.*are a tuple.*a function'):
        model.fit(x, y, verbose=0)


# --- a schedule of the epoch alone ---------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [lambda epoch: 0.1 * 0.5**epoch, lambda epoch, rate: 0.1 * 0.5**epoch]
)
@pytest.mark.parametrize("per", ["epoch", "step"])
def test_schedules_of_one_argument_and_of_two(some: sg.Strategy, schedule: Any, per: str) -> None:
    x, y = data(20)
    hand = mlp()
    optimizer = torch.optim.SGD(hand.parameters(), lr=1.0)
    for epoch in range(3):
        for batch in range(2):
            rows = slice(10 * batch, 10 * batch + 10)
            rate = 0.1 * 0.5 ** (epoch if per == "epoch" else 2 * epoch + batch)
            optimizer.param_groups[0]["lr"] = rate
            F.cross_entropy(hand(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    model = sg.Model(mlp(), some)
    model.compile(lambda params: torch.optim.SGD(params, lr=1.0), "cross_entropy")
    model.fit(
        x,
        y,
        epochs=3,
        batch_size=10,
        shuffle=False,
        verbose=0,
        callbacks=[sg.callbacks.LearningRateScheduler(schedule, per)],
    )
    assert distance(model.module, hand) < 1e-6


# --- another optimizer's state -------------------------------------------------------------------


@pytest.mark.parametrize("other", ["sgd", "adamw"])
def test_another_optimizers_state_is_refused(some: sg.Strategy, tmp_path: Path, other: str) -> None:
    x, y = data(20)
    saved = sg.Model(mlp(), some)
    saved.compile("adam", "cross_entropy")
    saved.fit(x, y, verbose=0)
    saved.save(tmp_path / "m")
    before = mlp()
    model = sg.Model(copy.deepcopy(before), some)
    model.compile(other, "cross_entropy")
    with pytest.raises(sg.UsageError, match=r"of Adam.*compile.*before compile"):
        model.load(tmp_path / "m")
    assert distance(model.module, before) == 0.0
    again = sg.Model(mlp(), some)
    again.load(tmp_path / "m")
    again.compile(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "cross_entropy")
    again.fit(x, y, batch_size=20, shuffle=False, verbose=0)

    def sgd(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    expected = by_hand(saved.module, sgd, F.cross_entropy, x, y, batch=20, epochs=1)
    assert distance(again.module, expected) < 1e-6


# --- a loss that is trained ----------------------------------------------------------------------


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.heat, target)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = mlp(), Tempered()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_parameters_of_a_loss_belong_into_the_module(some: sg.Strategy) -> None:
    x, y = data(37)
    loss, net = Tempered(), mlp()
    both = [*net.parameters(), *loss.parameters()]
    with pytest.raises(sg.UsageError, match=r"loss.*module\.loss = loss"):
        sg.Model(net, some).compile(torch.optim.SGD(both, lr=0.1), loss)
    hand = WithLoss()
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1)
    for start in range(0, 37, 8):
        rows = slice(start, start + 8)
        hand.loss(hand(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    module = WithLoss()
    model = sg.Model(module, some)
    model.compile(lambda params: torch.optim.SGD(params, lr=0.1), module.loss)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert hand.loss.heat.item() != 1.0 and distance(module, hand) < 1e-6


# --- limits of the gradient ----------------------------------------------------------------------


@pytest.mark.parametrize("limit", [-1.0, 0, float("nan")])
@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
def test_limits_that_are_not_positive(name: str, limit: float) -> None:
    with pytest.raises(sg.UsageError, match=rf"{name} is {limit}; it must be more than 0"):
        sg.Model(mlp()).compile("sgd", "cross_entropy", **{name: limit})


# --- a share of one row --------------------------------------------------------------------------


class WantsTwo(nn.Module):
    """Stands for a kernel that fails with a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("two rows, please")
        return self.layer(x)


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_a_model_that_wants_two_rows_is_told_of_its_share(two: sg.Strategy, verb: str) -> None:
    model = sg.Model(WantsTwo(), two)
    model.compile("sgd", "cross_entropy")
    x, y = data(10)
    told = r"two rows, please(.|\n)*replica [01] has 1 of this batch's 2 rows.*drop_last=True"
    with pytest.raises((ValueError, sg.ReplicaFailed), match=told):
        getattr(model, verb)(*((x,) if verb == "predict" else (x, y)), batch_size=4, verbose=0)
