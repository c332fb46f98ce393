"""Dict outputs whose entries are also attributes, as of Hugging Face's models."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

import stratagem as sg
from tests.support import data, mlp

pytestmark = pytest.mark.timeout(60)


class Looked(OrderedDict[str, Any]):
    """A dict that looks up attributes among its entries."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Shared(dict[str, Any]):
    """A dict whose `__dict__` is itself."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


@dataclass
class Mirrored(OrderedDict[str, Any]):
    """Like Hugging Face's ModelOutput: entries and attributes set each other; None is no entry."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        made, _, *others = super().__reduce__()
        return made, (self.logits, self.loss), *others


class Net(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(logits=self.net(x))


class Right(torchmetrics.MeanMetric):
    """Asserts that outputs are detached from the graph."""

    def update(self, output: Any, target: Tensor) -> None:  # type: ignore[override]
        assert not output.logits.requires_grad and not output["logits"].requires_grad
        assert output.logits is output["logits"]
        super().update((output.logits.argmax(1) == target).float())


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target, reduction="none")


def hits(output: Any, target: Tensor) -> Tensor:
    return (output.logits.argmax(1) == target).float()


@pytest.mark.parametrize("kind", [Looked, Shared, Mirrored])
def test_metrics_get_outputs_of_the_kind_that_the_model_returns(
    some: sg.Strategy, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(37)
    model = sg.Model(Net(kind), some)
    metrics = {"hits": hits, "right": Right(), "mean": lambda o, t: hits(o, t).mean()}
    model.compile("sgd", loss, metrics)
    history = model.fit(x, y, batch_size=8, verbose=0, validation_data=(x, y)).history
    with torch.no_grad():
        expected = float((model.module.net(x).argmax(1) == y).float().mean())
    for name in ("hits", "right", "mean"):
        assert history[f"val_{name}"] == pytest.approx([expected], abs=1e-6)
    assert "cannot be tried" not in caplog.text
