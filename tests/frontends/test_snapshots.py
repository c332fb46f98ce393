"""Containers and arrays of a model or dataset that callbacks change in place."""

from __future__ import annotations

import copy
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import stratagem as sg
from stratagem.errors import NotDistributable
from stratagem.frontends import snapshots
from stratagem.wire import tree
from tests.support import data, distance

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


def halve(key: Any) -> Callable[[Any], None]:
    def change(held: Any) -> None:
        held[key] = held[key] * 0.5

    return change


#: what lies there, the factor in it, how it is changed
CASES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], object]]] = {
    "int keys": ({0: 1.0}, lambda v: v[0], halve(0)),
    "tuple keys": ({(0, "a"): 1.0}, lambda v: v[0, "a"], halve((0, "a"))),
    "array": (np.ones(2, "float32"), lambda v: float(v[0]), halve(0)),
    "large array": (np.ones((900, 900)), lambda v: float(v[5, 5]), lambda v: v.__imul__(0.5)),
    "tensor in a dict": ({"a": torch.ones(())}, lambda v: v["a"], lambda v: v["a"].mul_(0.5)),
    "another tensor": ({"a": torch.ones(())}, lambda v: v["a"], halve("a")),
    "tensor in a list": ([torch.ones(())], lambda v: v[0], lambda v: v[0].mul_(0.5)),
    "array in a dict": ({1: np.ones(2)}, lambda v: float(v[1][0]), lambda v: v[1].__imul__(0.5)),
    "deque": (deque([1.0], 5), lambda v: v[-1], lambda v: v.append(v[-1] / 2)),
    "set": ({"x"}, lambda v: 1 / len(v), lambda v: v.add(str(len(v)))),
    "defaultdict": (defaultdict(float, {"a": 1.0}), lambda v: v["a"] + v["b"], halve("a")),
    "ordered": (OrderedDict(a=1.0), lambda v: v["a"], halve("a")),
    "counter": (Counter(a=1), lambda v: 1 / v["a"], lambda v: v.update("a")),
    "long list": ([1.0] * 300, lambda v: v[7], halve(7)),
    "very long list": ([1.0] * 9000, lambda v: v[0] * v[1], lambda v: v.__setitem__(0, v[0] / 2)),
    "long dict": ({i: [1.0] for i in range(400)}, lambda v: v[0][0], lambda v: v[0].insert(0, 0.5)),
}  # fmt: skip


class Holder(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.name, self.held = nn.Linear(6, 4), name, copy.deepcopy(CASES[name][0])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * CASES[self.name][1](self.held)  # type: ignore[no-any-return]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Change(sg.callbacks.Callback):
    def __init__(self, change: Callable[[], object]) -> None:
        super().__init__()
        self.change = change

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.change()


def alone(name: str) -> nn.Module:
    """Three epochs by hand; the factor changes after each."""
    module, (x, y) = Holder(name), data(24)
    optimizer = sgd(module.parameters())
    for _ in range(3):
        for start in range(0, 24, 12):
            optimizer.zero_grad()
            part = slice(start, start + 12)
            nn.functional.cross_entropy(module(x[part]), y[part]).backward()
            optimizer.step()
        CASES[name][2](module.held)
    return module


HOW: dict[str, Any] = {"epochs": 3, "verbose": 0}


@pytest.mark.parametrize("name", list(CASES))
def test_of_a_model(three: sg.MirroredStrategy, name: str) -> None:
    module, (x, y) = Holder(name), data(24)
    model = sg.Model(module, three)
    model.compile(sgd, "cross_entropy")
    change = Change(lambda: CASES[name][2](module.held))
    model.fit(x, y, batch_size=12, shuffle=False, callbacks=[change], **HOW)
    assert distance(alone(name), model.module) < 1e-5


class Factors(Dataset[Any]):
    """The factor is one of the data's."""

    def __init__(self, name: str) -> None:
        self.name, self.held = name, copy.deepcopy(CASES[name][0])
        self.x, self.y = data(24)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> Any:
        factor = CASES[self.name][1](self.held)
        return torch.cat([self.x[row] * factor, torch.as_tensor(factor).reshape(1)]), self.y[row]


class Scaled(nn.Module):
    """As the holder, with the factor among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        factor = x[:, 6:].float()
        return self.inner(x[:, :6].float() / factor) * factor  # type: ignore[no-any-return]


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("name", ["int keys", "array", "tensor in a list"])
def test_of_a_dataset(three: sg.MirroredStrategy, name: str, loader: bool) -> None:
    given = Factors(name)
    model = sg.Model(Scaled(), three)
    model.compile(sgd, "cross_entropy")
    how = {"callbacks": [Change(lambda: CASES[name][2](given.held))], **HOW}
    if loader:
        model.fit(DataLoader(given, 12), **how)
    else:
        model.fit(given, batch_size=12, shuffle=False, **how)
    expected = alone(name)
    assert isinstance(expected, Holder)
    assert distance(expected.inner, model.module.inner) < 1e-5


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_of_datasets_in_a_row(three: sg.MirroredStrategy, kind: str) -> None:
    """As one device: after the first epoch the second dataset is another one."""
    x, y = data(24)
    ends = []
    for where in (None, three):
        inner: Any = Factors("array") if kind == "numbers" else TensorDataset(x.clone(), y)
        model = sg.Model(nn.Linear(7 if kind == "numbers" else 6, 4), where)
        with torch.no_grad():
            model.module.weight.fill_(0.1)
            model.module.bias.zero_()
        model.compile(sgd, "cross_entropy")

        def change() -> None:
            if kind == "numbers":
                inner.held[0] *= 0.5  # noqa: B023
            else:
                inner.tensors[0].mul_(0.5)  # noqa: B023

        given = ConcatDataset([Subset(inner, range(5)), Subset(inner, range(24))])
        model.fit(given, batch_size=12, shuffle=False, callbacks=[Change(change)], **HOW)
        ends.append(model.module)
    assert distance(*ends) < 1e-5


def test_what_is_too_large_is_refused(two: sg.MirroredStrategy) -> None:
    class Words(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4)
            self.words = np.array(["one", "two"])

    module, (x, y) = Words(), data(24)
    model = sg.Model(module, two)
    model.compile(sgd, "cross_entropy")

    def change() -> None:
        module.words[0] = "six"

    with pytest.raises(NotDistributable, match=r"changed 'model.words', a ndarray.*two fits"):
        model.fit(x, y, batch_size=12, callbacks=[Change(change)], **HOW)


def test_weights_in_a_list_stay_weights(two: sg.MirroredStrategy) -> None:
    """Which a callback may change as weights."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.inner = nn.Linear(6, 4)
            self.all = [self.inner.weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.all[0].T

    ends, (x, y) = [], data(24)
    for where in (None, two):
        model = sg.Model(Tied(), where)
        model.compile(sgd, "cross_entropy")

        def change() -> None:
            with torch.no_grad():
                model.module.all[0].mul_(0.5)  # noqa: B023

        model.fit(x, y, batch_size=12, shuffle=False, callbacks=[Change(change)], **HOW)
        ends.append(model.module)
    assert distance(*ends) < 1e-5


KEYS = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.tuples(st.integers())
VALUES = st.recursive(
    KEYS | st.floats(allow_nan=False),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3),
        st.sets(KEYS, max_size=3), st.frozensets(KEYS, max_size=3),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 4)),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
    ),
    max_leaves=6,
)  # fmt: skip


@given(VALUES)
def test_there_and_back(value: Any) -> None:
    packed = tree.decode(tree.encode([snapshots.pack(snapshots.take(value), "it")]))[0]
    found = snapshots.unpack(packed, CPU)
    assert found == value and type(found) is type(value)
    assert getattr(found, "maxlen", 0) == getattr(value, "maxlen", 0)
    assert getattr(found, "default_factory", 0) == getattr(value, "default_factory", 0)


@pytest.mark.parametrize(
    "value",
    [np.zeros(30_000_000, "int8"), [(str(i), i) for i in range(300_000)], [0.5] * 1_000_000],
    ids=["array", "pairs", "numbers"],
)
def test_looking_is_quick_however_large_it_is(value: Any) -> None:
    snapshots.take(value)
    began = time.perf_counter()
    for _ in range(20):
        snapshots.take(value)
    assert (time.perf_counter() - began) / 20 < 0.01
