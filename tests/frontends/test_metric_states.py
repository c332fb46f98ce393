"""Custom metrics: which states replicas can join, and which results are no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

import stratagem as sg
from tests.support import data, mlp

pytestmark = pytest.mark.timeout(60)


class Attributes(torchmetrics.Metric):
    """Counts in plain attributes, which works on one device only."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.seen = 0, 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.right += int((output.argmax(1) == target).sum())
        self.seen += len(target)

    def compute(self) -> Tensor:
        return torch.as_tensor(self.right / max(self.seen, 1))


class States(Attributes):
    def __init__(self) -> None:
        torchmetrics.Metric.__init__(self)
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")


class MadeOf(torchmetrics.Metric):
    """Has no states but those of an inner metric."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = States()

    def update(self, output: Tensor, target: Tensor) -> None:
        self.inner.update(output, target)

    def compute(self) -> Any:
        return self.inner.compute()

    def reset(self) -> None:
        super().reset()
        self.inner.reset()


def model_with(where: Any, metric: Any) -> sg.Model:
    model = sg.Model(mlp(), where)
    model.compile("sgd", "cross_entropy", {"own": metric})
    return model


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_plain_attributes_are_refused(three: sg.MirroredStrategy, verb: str) -> None:
    x, y = data(41)
    words = r"metric Attributes has no states.*add_state"
    with pytest.raises(sg.NotDistributable, match=words):
        getattr(model_with(three, Attributes()), verb)(x, y, verbose=0)
    getattr(model_with(None, Attributes()), verb)(x, y, verbose=0)


@pytest.mark.parametrize("kind", [States, MadeOf])
def test_states_are_joined(three: sg.MirroredStrategy, kind: Any) -> None:
    x, y = data(41)
    model = model_with(three, kind())
    with torch.no_grad():
        expected = float((model.module(x).argmax(1) == y).float().mean())
    assert model.evaluate(x, y, batch_size=9)["own"] == pytest.approx(expected)


@pytest.mark.parametrize("several", [False, True])
def test_a_curve_is_no_number(three: sg.MirroredStrategy, several: bool) -> None:
    x, y = data(41)
    metric = torchmetrics.ROC(task="multiclass", num_classes=4)  # type: ignore[abstract]
    with pytest.raises(sg.UsageError, match=r'metric "own" returns a tuple.*AUROC'):
        model_with(three if several else None, metric).evaluate(x, y)
