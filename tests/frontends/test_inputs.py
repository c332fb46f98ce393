"""`validation_split` and `class_weight` work as in Keras' fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stratagem as sg
from stratagem.errors import UsageError
from stratagem.frontends.inputs import to_train_on
from stratagem.frontends.sources import ArraySource, Source
from tests.support import data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(60)


def sources(
    *data: Any, split: float | None = None, class_weight: Any = None
) -> tuple[Any, Source | None]:
    return to_train_on(
        data,  # type: ignore[arg-type]
        None,
        split,
        class_weight,
        batch_size=4,
        shuffle=True,
        validation_batch_size=None,
    )


@given(rows=st.integers(2, 50), part=st.floats(0.01, 0.99))
def test_nothing_is_lost_and_the_last_are_held_out(rows: int, part: float) -> None:
    x, y = np.arange(rows), {"a": torch.arange(rows), "b": (np.arange(rows),)}
    try:
        mine, theirs = sources(x, y, None, split=part)
    except UsageError:
        assert int(rows * (1 - part)) in (0, rows)
        return
    assert isinstance(theirs, ArraySource) and mine.shuffle and not theirs.shuffle
    assert mine.x.tolist() + theirs.x.tolist() == list(range(rows))
    assert mine.length == int(rows * (1 - part))
    for each in (mine, theirs):
        assert each.y["a"].tolist() == each.y["b"][0].tolist() == each.x.tolist()


@pytest.mark.parametrize(
    "y",
    [
        [0, 2, 1, 2],
        np.array([[0], [2], [1], [2]]),
        F.one_hot(torch.tensor([0, 2, 1, 2])),
        torch.tensor([0.0, 2.0, 1.0, 2.0]),
    ],
    ids=["list", "column", "one_hot", "float"],
)
def test_each_example_weighs_what_its_class_does(y: Any) -> None:
    x = torch.zeros(4, 1)
    mine, _ = sources(x, y, None, class_weight={2: 3.0, 0: 0.5})
    assert mine.weight.tolist() == [0.5, 3.0, 1.0, 3.0]
    mine, _ = sources(x, y, [1.0, 2.0, 3.0, 0.0], class_weight=[1.0, 1.0, 3.0])
    assert mine.weight.tolist() == [1.0, 6.0, 3.0, 0.0]


def test_as_one_device_by_hand() -> None:
    x, y = data(50)
    weights = torch.tensor([1.0, 4.0, 1.0, 0.5])
    where = strategy(2)
    model = sg.Model(mlp(), where)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
    history = model.fit(
        x.numpy(),
        y.numpy(),
        batch_size=7,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_split=0.2,
        class_weight={1: 4.0, 3: 0.5},
    ).history
    where.close()
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        for start in range(0, 40, 7):
            rows = slice(start, min(start + 7, 40))
            each = F.cross_entropy(module(x[rows]), y[rows], reduction="none") * weights[y[rows]]
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
    assert distance(module, model.module) < 1e-6
    expected = float(F.cross_entropy(module(x[40:]), y[40:]).detach())
    assert abs(history["val_loss"][-1] - expected) < 1e-5


X, Y = data(8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation_split": 1.5}, "it is a part of the data"),
        ({"validation_split": 0.99}, "leaves one side empty"),
        ({"validation_split": 0.5, "validation_data": (X, Y)}, "not both"),
        ({"x": [(X, Y)], "y": None, "validation_split": 0.5}, "as validation_data"),
        ({"x": [(X, Y)], "y": None, "class_weight": {0: 1.0}}, "one array of classes"),
        ({"y": torch.randn(8), "class_weight": {0: 1.0}}, "a class for each example"),
        ({"batch_size": 8.0}, "a whole number"),
        ({"batch_size": "8"}, "a whole number"),
    ],
)
def test_misuse_is_a_sentence(options: dict[str, Any], words: str) -> None:
    model = sg.Model(nn.Linear(6, 4))
    model.compile("sgd", "cross_entropy")
    with pytest.raises(UsageError, match=words):
        model.fit(**{"x": X, "y": Y, "verbose": 0, **options})
