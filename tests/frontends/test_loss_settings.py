"""Settings of a torch loss that the user changes between two fits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.frontends.losses import resolve
from tests.support import data, distance, mlp

pytestmark = pytest.mark.timeout(60)


def smooth(loss: Any) -> None:
    loss.label_smoothing += 0.2


def ignore(loss: Any) -> None:
    loss.ignore_index = 1


def replace(loss: Any) -> None:
    loss.weight = torch.tensor([3.0, 1.0, 1.0, 0.5])


def write(loss: Any) -> None:
    loss.weight[0].mul_(3.0)


def heavy(kind: Any) -> nn.Module:
    return kind(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))  # type: ignore[no-any-return]


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).log_softmax(1)  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "smoothing": (nn.CrossEntropyLoss, smooth),
    "ignored": (nn.CrossEntropyLoss, ignore),
    "new weights": (nn.CrossEntropyLoss, replace),
    "other weights": (lambda: heavy(nn.CrossEntropyLoss), replace),
    "written weights": (lambda: heavy(nn.CrossEntropyLoss), write),
    "nll": (lambda: heavy(nn.NLLLoss), write),
}


def alone(module: nn.Module, loss: nn.Module, change: Callable[[Any], None]) -> nn.Module:
    """Train three epochs by hand; the loss's settings change after each."""
    x, y = data(31)
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    for _ in range(3):
        for start in range(0, 31, 10):
            optimizer.zero_grad()
            loss(module(x[start : start + 10]), y[start : start + 10]).backward()
            optimizer.step()
        change(loss)
    return module


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_the_loss_is_what_it_has_become(
    three: sg.MirroredStrategy, name: str, several: bool
) -> None:
    make, change = CASES[name]
    module = Logs() if name == "nll" else mlp()
    expected = alone(module, make(), change)
    loss, (x, y) = make(), data(31)

    model = sg.Model(module, three if several else None)
    model.compile(lambda params: torch.optim.SGD(params, lr=0.2), loss)
    how: dict[str, Any] = {"batch_size": 10, "shuffle": False, "verbose": 0}
    for _ in range(3):
        model.fit(x, y, **how)
        change(loss)
    assert distance(expected, model.module) < 1e-5


def test_it_travels_with_its_settings() -> None:
    loss = pickle.loads(pickle.dumps(resolve(heavy(nn.CrossEntropyLoss))))
    output, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    expected = heavy(nn.CrossEntropyLoss)(output, target)
    assert torch.allclose(loss.mean(output, target, None), expected)
