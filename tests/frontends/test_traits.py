"""Numbers and switches of a model that callbacks change: replicas follow, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem.errors import NotDistributable
from stratagem.frontends import traits
from stratagem.frontends.losses import resolve
from tests.support import data, distance

pytestmark = pytest.mark.timeout(60)

config = SimpleNamespace(by=1.0)
shift = 0.5
strength = {"value": 1.0}


def helper() -> float:
    return shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(8, 4)
        self.factor = 1.0
        self.config = SimpleNamespace(gain=2.0)
        self.activation = torch.tanh
        self.mask = torch.ones(8)  # no buffer
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.activation(self.first(x))) * self.mask
        self.seen = [*self.seen[-2:], float(x[0, 0])]  # it keeps a diary of its own
        factor = self.factor * self.config.gain * getattr(self, "late", 1.0)
        result: Tensor = self.last(hidden) * factor * helper()
        return result


def weighed(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="none") * strength["value"]


class Weighing:
    """A loss with a number of its own, and one of its class."""

    sharp = 1.0

    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        values = nn.functional.cross_entropy(output * Weighing.sharp, target, reduction="none")
        return values * self.by * config.by


def freeze(model: Any, epoch: int) -> None:
    model.module.first.requires_grad_(epoch >= 1)


def keep_all(model: Any, epoch: int) -> None:
    model.module.drop.p = 0.9
    model.module.drop.eval()


def set_shift(model: Any, epoch: int) -> None:
    global shift
    shift = epoch / 4


def set_of(where: Callable[[Any], Any], name: str) -> Callable[[Any, int], None]:
    return lambda model, epoch: setattr(where(model), name, 1.0 + epoch)


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "frozen": freeze,
    "dropout": lambda model, epoch: setattr(model.module.drop, "p", 1.0),
    "switch": keep_all,
    "attribute": set_of(lambda model: model.module, "factor"),
    "new": set_of(lambda model: model.module, "late"),
    "configuration": set_of(lambda model: model.module.config, "gain"),
    "tensor": lambda model, epoch: setattr(model.module, "mask", torch.ones(8) * epoch),
    "in_place": lambda model, epoch: model.module.mask.mul_(1.5),
    "global": set_shift,
    "dict": lambda model, epoch: strength.update(value=1.0 + epoch),
    "loss": set_of(lambda model: model.loss.function, "by"),
    "loss_class": set_of(lambda model: Weighing, "sharp"),
    "loss_object": set_of(lambda model: config, "by"),
}


def train(where: Any, callback: sg.callbacks.Callback, loss: Any = weighed) -> nn.Module:
    global shift
    shift = 0.5
    strength["value"] = Weighing.sharp = config.by = 1.0
    x, y = data(40)
    torch.manual_seed(5)
    model = sg.Model(Net(), where)
    model.compile(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), loss)
    model.fit(x, y, batch_size=10, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    return model.module


@pytest.mark.parametrize("kind", CHANGES)
def test_replicas_follow(kind: str, two: sg.MirroredStrategy) -> None:
    class Change(sg.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            CHANGES[kind](self.model, epoch)

    ends = []
    for where in (None, two):
        ends.append(train(where, Change(), Weighing() if "loss" in kind else weighed))
    assert distance(*ends) < 1e-5
    unchanged = train(None, sg.callbacks.Callback())
    assert kind == "switch" or distance(ends[0], unchanged) > 1e-3


def test_between_batches_too(two: sg.MirroredStrategy) -> None:
    class Warm(sg.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.module.factor = 1.0 + batch / 4

    assert distance(train(None, Warm()), train(two, Warm())) < 1e-5


def test_a_closure_of_the_loss(two: sg.MirroredStrategy) -> None:
    ends = []
    for where in (None, two):
        by = 1.0

        def closed(output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output, target, reduction="none") * by  # noqa: B023

        class Raise(sg.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                nonlocal by
                by += 1.0

        ends.append(train(where, Raise(), closed))
    assert distance(*ends) < 1e-5


@pytest.mark.parametrize("name", ["activation", "last"])
def test_what_cannot_travel_is_refused(name: str, two: sg.MirroredStrategy) -> None:
    other: Any = torch.relu if name == "activation" else nn.Linear(8, 4)

    class Replace(sg.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            setattr(self.model.module, name, other)

    with pytest.raises(NotDistributable, match=f"replaced 'model.{name}'"):
        train(two, Replace())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(before=PLAIN, after=PLAIN)
def test_a_follower_becomes_what_the_chief_is(before: Any, after: Any) -> None:
    module, loss = Net(), resolve("cross_entropy")
    module.factor = before
    follower = copy.deepcopy(module)
    settled = traits.look(module, loss)
    module.factor = after
    told = traits.changes(settled, traits.look(module, loss))
    assert [traits.say(each) for each in told] == (["model.factor"] if before != after else [])
    traits.adopt(follower, loss, told)
    assert follower.factor == after


def test_nothing_changed_is_nothing_told() -> None:
    module, loss = Net(), resolve(Weighing())
    assert traits.changes(traits.look(module, loss), traits.look(module, loss)) == []


def test_logs_of_a_batch_are_a_dict(two: sg.MirroredStrategy) -> None:
    seen = []

    class Read(sg.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert "loss" in logs and "other" not in logs
            seen.append([dict(logs), {**logs}, dict(logs.items()), list(logs)])

    train(two, Read())
    assert len(seen) == 12
    for copied, spread, items, names in seen:
        assert copied == spread == items and names == ["loss"] and copied["loss"] > 0


def test_what_the_code_looks_up_is_the_chiefs(two: sg.MirroredStrategy) -> None:
    """Replicas have been running since before it was changed."""
    global shift
    x, y = data(40)
    model = sg.Model(Net(), two)
    model.compile("sgd", weighed)
    for shift in (0.25, 3.0):
        strength["value"] = shift
        here = weighed(model.module(x), y).mean().detach()
        assert abs(model.evaluate(x, y, batch_size=40)["loss"] - float(here)) < 1e-5
        assert torch.allclose(model.predict(x), model.module(x), atol=1e-6)
