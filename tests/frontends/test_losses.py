"""Losses of shares add up to the loss of the whole batch, for any split."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stratagem.errors import UsageError
from stratagem.frontends.losses import resolve

CASES: dict[str, Any] = {
    "cross_entropy": "cross_entropy",
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 3.0])),
    "smooth": nn.CrossEntropyLoss(label_smoothing=0.3),
    "ignoring": nn.CrossEntropyLoss(ignore_index=1),
    "nll": nn.NLLLoss(weight=torch.tensor([0.1, 2.0, 3.0])),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "own mean": lambda o, t: F.cross_entropy(o, t, ignore_index=-1),
    "own rows": lambda o, t: F.cross_entropy(o, t, reduction="none", ignore_index=-1),
}


def total(
    loss: Any, output: Tensor, target: Tensor, cuts: list[int], weight: Tensor | None
) -> float:
    edges = sorted({0, len(target), *(c % len(target) for c in cuts)})
    above, below = 0.0, 0.0
    for a, b in pairwise(edges):
        part = None if weight is None else weight[a:b]
        n, d = loss.terms(output[a:b], target[a:b], part, b - a)
        above += float(n)
        below += (b - a) / len(target) if d is None else float(d)
    return above / below


@pytest.mark.parametrize("name", list(CASES))
@given(st.integers(2, 30), st.lists(st.integers(0, 100), max_size=5))
def test_terms_add_up(name: str, rows: int, cuts: list[int]) -> None:
    dice = torch.Generator().manual_seed(rows)
    output = torch.randn(rows, 3, generator=dice).log_softmax(1)
    target = torch.randint(0, 3, (rows,), generator=dice)
    target[0] = 0
    if name == "cross_entropy":
        target[1:] = torch.where(target[1:] == 2, -100, target[1:])
    loss = resolve(CASES[name])
    whole = float(loss.mean(output, target, None))
    assert total(loss, output, target, cuts, None) == pytest.approx(whole, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["cross_entropy", "mse", nn.L1Loss(), "own rows"])
def test_sample_weights_are_a_mean_over_rows(name: Any) -> None:
    target = torch.tensor([0, 1, 2, 0])
    output = torch.randn(4, 3)
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5])
    loss = resolve(CASES.get(name, name) if isinstance(name, str) else name)
    if name in ("cross_entropy", "own rows"):
        each = F.cross_entropy(output, target, reduction="none")
        goal: Tensor = target
    else:
        goal = torch.randn(4, 3)
        each = ((output - goal) ** 2 if name == "mse" else (output - goal).abs()).mean(1)
    expected = float((each * weight).sum() / 4)
    assert float(loss.mean(output, goal, weight)) == pytest.approx(expected, rel=1e-5)
    assert total(loss, output, goal, [1, 3], weight) == pytest.approx(expected, rel=1e-5)


def test_weights_need_a_value_for_each_row() -> None:
    loss = resolve(lambda output, target: output.sum())
    with pytest.raises(UsageError, match="each example"):
        loss.mean(torch.ones(2, 1), torch.ones(2), torch.ones(2))
    with pytest.raises(UsageError, match="reduction"):
        resolve(nn.MSELoss(reduction="sum")).mean(torch.ones(2), torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("odd", ["nonsense", 42, "__doc__"])
def test_no_loss(odd: Any) -> None:
    with pytest.raises(UsageError, match="cross_entropy"):
        resolve(odd)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss])
def test_a_class_is_no_loss(kind: Any) -> None:
    with pytest.raises(UsageError, match=rf"{kind.__name__} is a class; give an instance"):
        resolve(kind)


def test_whose_loss_it_is() -> None:
    """A subclass of a torch loss that overrides forward is user code."""

    class Doubled(nn.CrossEntropyLoss):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return 2 * super().forward(output, target)

    class Same(nn.CrossEntropyLoss):
        pass

    output, target = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    mean = nn.functional.cross_entropy(output, target)
    doubled, same, hooked = resolve(Doubled()), resolve(Same()), nn.CrossEntropyLoss()
    assert doubled.own and not same.own and same.counted
    torch.testing.assert_close(doubled.mean(output, target, None), 2 * mean)
    torch.testing.assert_close(same.mean(output, target, None), mean)
    hooked.register_forward_hook(lambda module, args, value: 3 * value)
    assert resolve(hooked).own
    torch.testing.assert_close(resolve(hooked).mean(output, target, None), 3 * mean)
    assert not resolve("mse").own and not resolve(nn.MSELoss(reduction="sum")).own
    assert resolve(lambda output, target: output.sum()).own
