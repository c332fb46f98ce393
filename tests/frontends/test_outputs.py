"""What `predict` returns, and which outputs it cannot join."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from stratagem.frontends.adapter import check_rows, joined
from tests.support import by_hand, data, distance, strategy


@pytest.fixture(scope="module", params=[1, 2])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


@dataclass
class Scores:
    scores: Tensor


class Named(NamedTuple):
    scores: Tensor
    more: Any


class Returns(nn.Module):
    """Returns its layer's output in the given form."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.kind = nn.Linear(6, 4), kind
        self.memory = nn.LSTM(6, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        match self.kind:
            case "nothing":
                return None
            case "nothing in part":
                return y, None
            case "dataclass":
                return Scores(y)
            case "number":
                return {"y": y, "n": 3}
            case "mean":
                return y, y.mean()
            case "hidden state":
                return self.memory(x[:, None])
            case "in columns":
                return y.t()
            case "named":
                return Named(y, (y, Named(y[:, 0], y)))
            case "without a loss":
                return {"loss": None, "logits": y}
        return {"flat": y.reshape(-1), "rows": (y, y)}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("nothing", "NoneType"),
        ("nothing in part", "NoneType"),
        ("dataclass", "Scores"),
        ("number", "int"),
        ("mean", "tensor without rows"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(some: sg.Strategy, kind: str, word: str) -> None:
    x, _ = data(20)
    with pytest.raises(sg.UsageError, match=f"has a {word} in it; return tensors"):
        sg.Model(Returns(kind), some).predict(x, batch_size=8)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["hidden state", "in columns"])
def test_rows_that_are_not_in_front_are_refused(some: sg.Strategy, kind: str) -> None:
    x, _ = data(20)
    model = sg.Model(Returns(kind), some)
    if some.num_replicas_in_sync == 1:  # one batch is whatever the module makes of it
        shape = {"hidden state": (2, 20, 4), "in columns": (4, 20)}[kind]
        found = model.predict(x, batch_size=20)
        assert (found[1][0] if kind == "hidden state" else found).shape == shape
        return
    with pytest.raises(sg.NotDistributable, match=r"does not begin with its rows.*transpose"):
        model.predict(x, batch_size=20)


@pytest.mark.timeout(60)
def test_several_rows_for_each_example(some: sg.Strategy) -> None:
    x, _ = data(17)  # the last batch is one row
    model = sg.Model(Returns("else"), some)
    found = model.predict(x, batch_size=8)
    with torch.no_grad():
        expected = model.module(x)
    assert torch.allclose(found["flat"], expected["flat"], atol=1e-6)
    assert torch.allclose(found["rows"][1], expected["rows"][1], atol=1e-6)


@pytest.mark.timeout(60)
def test_names_of_outputs_stay(some: sg.Strategy) -> None:
    x, _ = data(17)
    model = sg.Model(Returns("named"), some)
    found = model.predict(x, batch_size=8)
    with torch.no_grad():
        expected = model.module(x)
    assert type(found) is Named and type(found.more[1]) is Named
    assert torch.allclose(found.scores, expected.scores, atol=1e-6)
    assert torch.allclose(found.more[1].scores, expected.more[1].scores, atol=1e-6)
    assert model.predict(x[:1]).scores.shape == (1, 4)  # other replicas have none
    model = sg.Model(Returns("without a loss"), some)
    logits = model.predict(x, batch_size=8)
    assert list(logits) == ["logits"]
    assert torch.allclose(logits["logits"], expected.scores, atol=1e-6)


class Squeezed(nn.Module):
    """A module whose output for one row has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze()


def own(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("batch", [2, 10])
@pytest.mark.parametrize("loss", ["binary_cross_entropy_with_logits", "mse", own])
def test_a_share_of_one_row_that_is_squeezed(some: sg.Strategy, batch: int, loss: Any) -> None:
    """Of 32 rows in batches of 10, the last batch has two."""
    x, _ = data(32)
    y = (x[:, 0] > 0).float()
    model = sg.Model(Squeezed(), some)
    model.compile(sgd, loss, ["accuracy"], from_logits=loss != "mse")
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    plain = F.mse_loss if loss == "mse" else own
    alone = by_hand(Squeezed(), sgd, plain, x, y, batch=batch)
    assert distance(alone, model.module) < 2e-6
    with torch.no_grad():
        expected = alone(x)
    found = model.predict(x, batch_size=batch)
    assert torch.allclose(found, expected, atol=1e-5)
    results = model.evaluate(x, y, batch_size=batch)
    assert results["loss"] == pytest.approx(float(plain(expected, y)), abs=1e-5)


@pytest.mark.timeout(60)
def test_a_last_batch_of_one_row_that_is_squeezed(some: sg.Strategy) -> None:
    x, _ = data(17)
    model = sg.Model(Squeezed(), some)
    found = model.predict(x, batch_size=8)
    with torch.no_grad():
        assert torch.allclose(found, model.module(x), atol=1e-6)


def test_two_layers_are_not_the_two_rows_of_a_share() -> None:
    """A share of two rows alone is ambiguous; the next share is not."""
    check_rows([torch.zeros(2, 2, 4)], [2])
    with pytest.raises(sg.NotDistributable, match=r"\(2, 3, 4\) for 3 examples"):
        check_rows([torch.zeros(2, 2, 4), torch.zeros(2, 3, 4)], [2, 3])
    with pytest.raises(sg.NotDistributable, match="for 1 examples"):
        check_rows([torch.tensor(1.0)], [1])
    check_rows([{"a": torch.zeros(0)}, {"a": torch.zeros(0)}], [2, 3])


def test_rows_of_several_lengths() -> None:
    with pytest.raises(sg.UsageError, match="fixed length"):
        joined([torch.ones(2, 3), torch.ones(2, 4)])
