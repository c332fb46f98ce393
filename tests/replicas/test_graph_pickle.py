"""Modules that torch itself does not pickle: they reach the replicas whole, or are refused."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import stratagem as sg
from stratagem.replicas import graph_pickle
from tests.support import by_hand, data, distance, mlp, moved

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def served() -> Iterator[sg.ParameterServerStrategy]:
    cluster = sg.LocalCluster(workers=2, ps=1)
    made = sg.ParameterServerStrategy(cluster, updates=sg.Synchronous())
    with contextlib.closing(made):
        yield made


def small_tensors() -> dict[str, Tensor]:
    numbers = torch.randn(4, dtype=torch.complex64)
    named = torch.arange(3.0)
    named.label = "kept"  # type: ignore[attr-defined]
    return {
        "number": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.randn(3, 2).bfloat16(),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "conjugate": numbers.conj(),
        "turned": torch.randn(3, 4).t(),
        "a part": torch.randn(100)[3:9],
        "named": named,
        "trained": torch.randn(3, requires_grad=True),
    }


@pytest.mark.parametrize("name", small_tensors())
def test_small_tensors_travel_whole(name: str) -> None:
    sent = small_tensors()[name]
    data, _ = graph_pickle.dumps(sent)
    for came in (graph_pickle.loads(data), graph_pickle.loads(graph_pickle.dumps_answer(sent))):
        assert came.dtype is sent.dtype and came.stride() == sent.stride()
        assert torch.equal(came.to(torch.complex64), sent.to(torch.complex64))
        assert came.requires_grad == sent.requires_grad and vars(came) == vars(sent)
        came.detach().zero_()  # it may be written to


class Doubled(nn.Module):
    """A parametrization of a class that only this file knows."""

    def forward(self, value: Tensor) -> Tensor:
        return 2 * value

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


def stack() -> nn.Module:
    torch.manual_seed(0)
    middle = nn.Linear(16, 16)
    parametrize.register_parametrization(middle, "weight", Doubled())
    parametrize.register_parametrization(middle, "weight", Doubled())
    parametrize.register_parametrization(middle, "bias", Doubled())
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 16)),
        nn.Tanh(),
        middle,
        parametrizations.spectral_norm(nn.Linear(16, 4)),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = parametrizations.weight_norm(nn.LSTM(3, 8), "weight_hh_l0")
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cells(x.view(-1, 2, 3).transpose(0, 1))
        return self.out(states[-1])  # type: ignore[no-any-return]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


# Not the stack with servers: each worker has buffers of its own, and spectral_norm has some.
@pytest.mark.parametrize(
    ("kind", "make"), [("two", stack), ("two", Recurrent), ("served", Recurrent)]
)
def test_parametrized_modules_train_as_on_one_device(
    kind: str, make: Callable[[], nn.Module], request: pytest.FixtureRequest
) -> None:
    x, y = data(64)
    net = make()
    reference = by_hand(net, sgd, F.cross_entropy, x, y, batch=16, epochs=2)
    model = sg.Model(copy.deepcopy(net), request.getfixturevalue(kind))
    model.compile(sgd, "cross_entropy")
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert moved(reference, net)
    assert distance(reference, model.module) < 1e-6


def test_a_parametrized_module_is_one_there_too() -> None:
    net = stack()
    parts, segments = graph_pickle.dumps((net, list(net.parameters())))
    there, params = graph_pickle.loads(parts)
    segments.clear()
    assert all(a is b for a, b in zip(there.parameters(), params, strict=True))
    assert isinstance(there[2], nn.Linear) and len(there[2].parametrizations.weight) == 2
    assert torch.equal(there[2].weight, net[2].weight)
    parametrize.remove_parametrizations(there[2], "weight")
    parametrize.remove_parametrizations(there[2], "bias")
    assert type(there[2]) is nn.Linear and torch.equal(there[2].weight, net[2].weight)
    assert parametrize.is_parametrized(net[2]), "the one here stays as it is"


@pytest.mark.parametrize("how", ["script", "trace"])
def test_what_torch_jit_has_compiled_is_refused(two: sg.MirroredStrategy, how: str) -> None:
    net = mlp()
    compiled = torch.jit.script(net) if how == "script" else torch.jit.trace(net, data(2)[0])
    model = sg.Model(compiled, two)
    model.compile(sgd, "cross_entropy")
    with pytest.raises(sg.UsageError, match=r"torch\.jit.*strategy\.run"):
        model.fit(*data(64), batch_size=16, verbose=0)

    def inside() -> float:
        return float(torch.jit.script(mlp())(torch.ones(1, 6)).detach().sum())

    assert len(set(two.run(inside))) == 1


def test_servers_say_it_too_if_something_cannot_travel(served: sg.ParameterServerStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"cannot be sent to them.*_thread.lock"):
        served.run(lambda lock: None, threading.Lock())
    assert served.run(lambda: 1) == [1, 1]


class Costly:
    """An object that is not to be made before it is needed."""

    made = 0

    def __reduce__(self) -> Any:
        return _make_costly, ({"a": [1]},), {"b": 2}


def _make_costly(_: Any) -> Costly:
    Costly.made += 1
    return Costly()


def test_preloading_imports_what_a_call_needs_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of its classes, and those that functions of a script use."""
    for name in ("preloaded_a", "preloaded_b"):
        (tmp_path / f"{name}.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    a, b = (importlib.import_module(f"preloaded_{name}") for name in "ab")
    thing: Any = a.Thing()
    thing.parts = {"net": stack(), "costly": Costly(), "set": {1.5}, "rows": np.zeros(1 << 15)}
    script: dict[str, Any] = {"b": b, "__name__": "__main__"}
    exec("def work(): return b.Thing()", script)
    call, _ = graph_pickle.dumps((script["work"], (thing,), {}))
    for name in ("preloaded_a", "preloaded_b"):
        del sys.modules[name]
    graph_pickle.preload(call)
    assert {"preloaded_a", "preloaded_b"} <= sys.modules.keys()
    assert Costly.made == 0
    (tmp_path / "preloaded_a.py").write_text("raise SystemExit(3)\n")
    del sys.modules["preloaded_a"]
    graph_pickle.preload(call)  # the call itself will say so
    graph_pickle.preload(b"no pickle")
