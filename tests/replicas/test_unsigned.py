"""Whole numbers without a sign (uint16: audio, depth images, tokens) travel like all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import by_hand, distance, moved, strategy

pytestmark = pytest.mark.timeout(60)

TYPES = [torch.uint16, torch.uint32, torch.uint64]


def numbers(rows: int, dtype: torch.dtype) -> Tensor:
    """Up to the greatest that the type has."""
    top = 2 ** (8 * dtype.itemsize) - 1
    found = np.linspace(0, 255, rows * 6).astype(np.uint64)
    found[-1] = top
    return torch.from_numpy(found.reshape(rows, 6)).to(dtype)


def features(dtype: torch.dtype) -> Tensor:
    return (torch.arange(40 * 6).reshape(40, 6) * 37 % 256).to(dtype)


LABELS = torch.arange(40) % 4


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.float() / 255)  # type: ignore[no-any-return]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.tolist() == other.tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_there_and_back(two: sg.Strategy, dtype: torch.dtype) -> None:
    """As arguments, in closures, as results; large, small, empty, and of odd strides."""
    whole = numbers(20_000, dtype)
    tensors = [whole, whole[:3], whole[0, 0], whole[:0], whole[:5, ::2].t()]
    frozen = nn.Parameter(whole[-2:], requires_grad=False)
    arrays = [whole.numpy(), whole[:3].numpy()]

    def twice(given: Any) -> Any:
        told = sg.current_replica().all_gather(frozen.data)
        return given, frozen, told

    for (came, came_arrays), held, told in two.run(twice, (tensors, arrays)):
        assert all(map(same, came, tensors))
        for array, sent in zip(came_arrays, arrays, strict=True):
            assert array.dtype == sent.dtype and (array == sent).all()
        assert isinstance(held, nn.Parameter) and same(held, frozen)
        assert all(same(each, frozen) for each in told)


@pytest.mark.parametrize("kind", ["tensors", "arrays", "dataset", "loader", "stream"])
@pytest.mark.parametrize("dtype", TYPES)
def test_fit_and_predict(two: sg.Strategy, dtype: torch.dtype, kind: str) -> None:
    x, y = features(dtype), LABELS
    source: Any = (x.numpy() if kind == "arrays" else x, y)
    if kind in ("dataset", "loader"):
        source = (TensorDataset(x, y),)
    if kind == "loader":
        source = (DataLoader(source[0], batch_size=10),)
    if kind == "stream":
        source = ([(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)],)
    model = sg.Model(Scaled(), two)
    model.compile(optimizer=sgd, loss="cross_entropy")
    size = {} if kind in ("loader", "stream") else {"batch_size": 10}
    model.fit(*source, epochs=2, shuffle=False, verbose=0, **size)
    alone = by_hand(Scaled(), sgd, F.cross_entropy, x, y, batch=10, epochs=2)
    assert moved(alone, Scaled())
    assert distance(model.module, alone) < 1e-5
    found = model.predict(source[0] if kind == "arrays" else x, batch_size=10, verbose=0)
    torch.testing.assert_close(torch.as_tensor(found), alone(x).detach(), rtol=0, atol=1e-5)


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.long(), reduction="none")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_labels_in_any_order(two: sg.Strategy, dtype: torch.dtype, replicas: int) -> None:
    """Shuffled as those of other types are, in one batch, whose order makes no difference."""
    x, y = features(dtype), LABELS.to(dtype)
    model = sg.Model(Scaled(), two if replicas == 2 else strategy(1))
    model.compile(optimizer=sgd, loss=own_loss)
    model.fit(x, y.numpy(), batch_size=40, epochs=3, shuffle=True, verbose=0)
    alone = by_hand(Scaled(), sgd, F.cross_entropy, x, LABELS, batch=40, epochs=3)
    assert moved(alone, Scaled())
    assert distance(model.module, alone) < 1e-5


def test_an_exception_with_one(two: sg.Strategy) -> None:
    def fail() -> None:
        if not sg.current_replica().is_chief:
            raise ValueError("here", torch.tensor([65535], dtype=torch.uint16))

    with pytest.raises(sg.ReplicaFailed, match="here") as found:
        two.run(fail)
    cause = found.value.__cause__
    assert isinstance(cause, ValueError)
    assert same(cause.args[1], torch.tensor([65535], dtype=torch.uint16))
