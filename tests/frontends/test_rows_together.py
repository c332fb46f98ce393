"""Losses whose value for a row depends on other rows, though their mean does not show it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from stratagem.errors import NotDistributable
from tests.support import by_hand, data, distance, mlp

pytestmark = pytest.mark.timeout(60)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def trained(where: Any, module: nn.Module, loss: Any, x: Any, y: Any, batch: int) -> nn.Module:
    model = sg.Model(copy.deepcopy(module), where)
    model.compile(sgd, loss)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model.module


def rows(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def scaled(output: Tensor, target: Tensor) -> Tensor:
    values = rows(output, target)
    return values / values.detach().mean()


def advantage(output: Tensor, target: Tensor) -> Tensor:
    """As in PPO, normalised over the batch, so that the mean is always nearly 0."""
    values = output[:, 0].detach() + target
    return (output[:, 1] - output[:, 1].detach()).exp() * (values - values.mean()) / 2


@pytest.mark.parametrize("batch", [3, 12, 13])
@pytest.mark.parametrize("loss", [scaled, advantage])
def test_rows_that_depend_on_others(three: sg.MirroredStrategy, loss: Any, batch: int) -> None:
    x, y = data(39)
    words = "the loss is not the mean over the rows.*depends for a row on the other.*check=False"
    with pytest.raises(NotDistributable, match=words):
        trained(three, mlp(), loss, x, y, batch)
    trained(None, mlp(), loss, x, y, batch)


def sorted_rows(output: Tensor, target: Tensor) -> Tensor:
    return rows(output, target).sort(descending=True).values


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1, 3, 4).transpose(0, 1)  # type: ignore[no-any-return]


def flat_time_first(output: Tensor, target: Tensor) -> Tensor:
    return rows(output.flatten(0, 1), target.T.flatten())


def half(output: Tensor, target: Tensor) -> Tensor:
    return (rows(output, target) * 1000).bfloat16().float() / 1000


@pytest.mark.parametrize("loss", [sorted_rows, flat_time_first, half])
def test_rows_in_any_order(
    three: sg.MirroredStrategy, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(39)
    module = TimeFirst() if loss is flat_time_first else mlp()
    target = (y[:, None] + torch.arange(3)) % 4 if loss is flat_time_first else y

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target).mean()  # type: ignore[no-any-return]

    expected = by_hand(module, sgd, mean, x, target, batch=13)
    assert distance(expected, trained(three, module, loss, x, target, 13)) < 1e-5
    assert "cannot be tried" not in caplog.text


@pytest.mark.parametrize("noise", [0.003, 0.5])
def test_noise_is_no_other_row(three: sg.MirroredStrategy, noise: float) -> None:
    """Noise in each row's loss is no dependence on other rows, and is not refused."""

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return rows(output, target) * (1 + noise * torch.randn(len(target)))

    x, y = data(1200)
    trained(three, mlp(), noisy, x, y, 600)


@pytest.mark.parametrize("noise", [0.003, 0.5])
def test_noise_does_not_hide_other_rows(three: sg.MirroredStrategy, noise: float) -> None:
    """A loss that mixes rows is refused with noise, too."""

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return scaled(output, target) * (1 + noise * torch.randn(len(target)))

    x, y = data(1200)
    with pytest.raises(
        NotDistributable,
        match=r"not the mean.* on the other rows",
    ):
        trained(three, mlp(), noisy, x, y, 600)


# --- a row and a column for each row --------------------------------------------------------------


class Pairs(nn.Module):
    """As in CLIP, compares every row with every other."""

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other = nn.Linear(6, 5), nn.Linear(6, 5)
        self.heat = nn.Parameter(torch.tensor(1.0))
        self.scale = scale

    def forward(self, x: Tensor) -> Any:
        one, other = F.normalize(self.one(x), dim=1), F.normalize(self.other(x.flip(1)), dim=1)
        if self.scale:
            return one @ other.T, self.heat.exp()
        return self.heat.exp() * one @ other.T


def both_ways(output: Tensor, target: Tensor) -> Tensor:
    own = torch.arange(len(output))
    return (F.cross_entropy(output, own) + F.cross_entropy(output.T, own)) / 2


def sigmoid(output: Tensor, target: Tensor) -> Tensor:
    return F.softplus(-(2 * torch.eye(len(output)) - 1) * output).sum(1)


def with_scale(output: Any, target: Tensor) -> Tensor:
    return both_ways(output[0] * output[1], target)


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize("loss", [both_ways, sigmoid, with_scale])
def test_everything_against_everything(three: sg.MirroredStrategy, loss: Any, verb: str) -> None:
    x, y = data(24)
    for where in (None, three):
        model = sg.Model(Pairs(scale=loss is with_scale), where)
        model.compile(sgd, loss)
        if where is None:
            getattr(model, verb)(x, y, batch_size=12, verbose=0)
            continue
        with pytest.raises(NotDistributable, match=r"compares rows with each other.*check=False"):
            getattr(model, verb)(x, y, batch_size=12, verbose=0)


def test_as_many_classes_as_rows(
    three: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss fails for fewer rows, so that the check is skipped with a warning."""

    def four_rows(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.view(4, 4), target)

    x, y = data(24)
    mean = by_hand(mlp(), sgd, four_rows_of_twelve, x, y, batch=12)
    assert distance(mean, trained(three, mlp(), four_rows, x, y, 12)) < 1e-5
    assert "cannot be tried" in caplog.text


def four_rows_of_twelve(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
