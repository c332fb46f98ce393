"""Changes by callbacks in mid-fit are followed by the replicas, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import AttributeTracker, adopt
from stratagem.wire.tree import decode, encode
from tests.support import data, distance

pytestmark = pytest.mark.timeout(60)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(8, 4)
        self.factor = 1.0
        self.held: dict[str, Any] = {"gains": [1.0, 2.0], "by": (torch.ones(()), 1)}
        self.activation = torch.tanh
        self.mask = torch.ones(8)  # no buffer
        self.seen: list[float] = []
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.activation(self.first(x))) * self.mask * self.gain
        self.seen = [*self.seen[-2:], float(x[0, 0])]  # it keeps a diary of its own
        factor = self.factor * self.held["gains"][-1] * self.held["by"][0]
        result: Tensor = self.last(hidden) * factor * getattr(self, "late", 1.0)
        return result


def freeze(model: Any, epoch: int) -> None:
    model.module.first.requires_grad_(epoch >= 1)


def keep_all(model: Any, epoch: int) -> None:
    model.module.drop.p = 0.9
    model.module.drop.eval()


def set_of(name: str) -> Callable[[Any, int], None]:
    return lambda model, epoch: setattr(model.module, name, 1.0 + epoch)


@torch.inference_mode()
def infer(model: Any, epoch: int) -> None:
    model.module.held["by"] = (torch.ones(()) * (1.5 + epoch), 1)


@torch.no_grad()
def write(model: Any, epoch: int) -> None:
    model.module.last.bias += 0.5


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "weights": write,
    "group": lambda model, epoch: model.optimizer.param_groups[0].update(lr=0.2, momentum=0.5),
    "frozen": freeze,
    "dropout": lambda model, epoch: setattr(model.module.drop, "p", 1.0),
    "switch": keep_all,
    "attribute": set_of("factor"),
    "new": set_of("late"),
    "tensor": lambda model, epoch: setattr(model.module, "mask", torch.ones(8) * epoch),
    "in_place": lambda model, epoch: model.module.mask.mul_(1.5),
    "inference": infer,
    "list": lambda model, epoch: model.module.held["gains"].append(2.5),
    "nested": lambda model, epoch: model.module.held["by"][0].mul_(1.5),
}


def train(
    where: Any, callback: sg.callbacks.Callback, dtype: torch.dtype = torch.float32
) -> nn.Module:
    x, y = data(40)
    torch.manual_seed(5)
    model, x = sg.Model(Net().to(dtype), where), x.to(dtype)
    model.compile(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), "cross_entropy")
    model.fit(x, y, batch_size=10, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    return model.module


@pytest.mark.parametrize("kind", CHANGES)
def test_replicas_follow(kind: str, two: sg.MirroredStrategy) -> None:
    class Change(sg.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            CHANGES[kind](self.model, epoch)

    ends = [train(where, Change()) for where in (None, two)]
    assert distance(*ends) < 1e-5
    unchanged = train(None, sg.callbacks.Callback())
    assert kind == "switch" or distance(ends[0], unchanged) > 1e-3


def test_another_buffer_is_followed(two: sg.MirroredStrategy) -> None:
    """A replaced buffer is followed by replicas with their own copy of the model."""

    class Fade(sg.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.module.gain = self.model.module.gain * 0.5

    ends = [train(where, Fade(), torch.float64) for where in (None, two)]
    assert distance(*ends) < 1e-12


def test_between_batches_too(two: sg.MirroredStrategy) -> None:
    class Warm(sg.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.module.factor = 1.0 + batch / 4

    assert distance(train(None, Warm()), train(two, Warm())) < 1e-5


def test_another_layer_is_refused(two: sg.MirroredStrategy) -> None:
    class Replace(sg.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.module.last = nn.Linear(8, 4)

    with pytest.raises(NotDistributable, match="replaced layers or parameters"):
        train(two, Replace())


class Writing(nn.Module):
    """Divides by a running mean of the outputs' size, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.scale = 0.9 * self.scale + 0.1 * output.detach().abs().mean()
        return nn.functional.cross_entropy(output, target) / self.scale


def test_a_loss_that_writes_into_its_buffers_is_refused(two: sg.MirroredStrategy) -> None:
    x, y = data(40)
    for where in (None, two):
        model = sg.Model(Net(), where)
        model.compile("sgd", Writing())
        with (
            pytest.raises(NotDistributable, match="Writing writes into") if where else nullcontext()
        ):
            model.fit(x, y, batch_size=20, verbose=0)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(before=PLAIN, after=PLAIN)
def test_a_follower_becomes_what_the_chief_is(before: Any, after: Any) -> None:
    module = Net()
    module.factor = before
    follower = copy.deepcopy(module)
    tracker = AttributeTracker([module], vars(nn.Module()), nested=True)
    assert tracker.changes() == []
    module.factor = after
    changes = tracker.changes()
    same = type(before) is type(after) and before == after
    assert [name for _, name, _ in changes] == ([] if same else ["factor"]) or before == after
    adopt([follower], decode(encode(changes)))
    assert follower.factor == after


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
