"""`sg.plan(model, batch)`: modules, sg.Model and Keras models; nothing is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stratagem as sg
from stratagem.errors import UsageError
from stratagem.plan.configuration import SHARDED
from tests.clock import PATIENCE

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure other replicas at once, which has a test of its own."""
    monkeypatch.setattr("stratagem.plan.measure.counts", lambda wanted: [])


def data(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), torch.randint(0, 4, (rows,))


def test_a_compiled_model(tmp_path: Path) -> None:
    model = sg.Model(nn.Linear(8, 4))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    before = [p.detach().clone() for p in model.module.parameters()]
    answer = sg.plan(model, data(), link="1Gbit", hosts=2, gpus_per_host=2)
    assert answer.plan.profile.batch == 12 and answer.plan.hardware.link == 1.25e8
    assert answer.plan.profile.one_set
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
    assert not model.optimizer.state and model.history is None
    assert answer.sentence in repr(answer)
    assert "<svg" in answer._repr_html_()
    assert answer.to_json()["recommendation"]["code"] == answer.code
    for kind in ("json", "html"):
        answer.save(str(tmp_path / f"plan.{kind}"))
    with pytest.raises(UsageError, match=r"\.json or \.html"):
        answer.save("plan.png")
    model.fit(*data(), epochs=1, batch_size=12, verbose=0)  # it trains as ever
    assert model.history is not None


def test_a_module_with_its_loss() -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    answer = sg.plan(net, data(), loss=cross_entropy, optimizer=optimizer, most=4)
    assert answer.recommendation.configuration.replicas <= 4


class Signs(nn.Module):
    """A layer that records the process that computes it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.layer, self.file = nn.Linear(8, 4), str(file)

    def forward(self, x: torch.Tensor) -> Any:
        with open(self.file, "a") as book:
            book.write(f"{os.getpid()}\n")
        return self.layer(x)


@pytest.mark.parametrize("compiled", [True, False])
def test_replicas_at_once_are_processes(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.plan.measure.counts", lambda wanted: [2])
    net = Signs(tmp_path / "book")
    options: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd"}
    if not compiled:
        options = {"loss": cross_entropy, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    answer = sg.plan(net, data(), most=2, **options)
    seen = Counter((tmp_path / "book").read_text().split())
    # processes that have stages trace it once, and then run its layers
    often = [pid for pid, count in seen.items() if count > 5]
    assert str(os.getpid()) in often and len(often) == 2
    found = answer.plan.profile
    assert [n for n, _ in found.crowd] == [2]


def _descent(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "cross_entropy", "optimizer": "adam"},
        {"optimizer": torch.optim.Adam},
        {"loss": nn.CrossEntropyLoss(), "optimizer": _descent},
    ],
)
def test_names_and_classes_as_compile_takes_them(options: dict[str, object]) -> None:
    net = nn.Linear(8, 4)
    before = [each.clone() for each in net.parameters()]
    given = {"loss": cross_entropy, **options}
    answer = sg.plan(net, data(), hosts=2, **given)  # type: ignore[arg-type]
    assert answer.plan.profile.batch == 12 and answer.plan.profile.dense_bytes == (32 + 4) * 4
    assert all(map(torch.equal, before, net.parameters()))
    assert all(each.grad is None for each in net.parameters())


def test_a_keras_model() -> None:
    keras = pytest.importorskip("keras")
    if keras.config.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
    before = [w.copy() for w in model.get_weights()]
    answer = sg.plan(model, tuple(part.numpy() for part in data()), hosts=2)
    found = answer.plan.profile
    assert found.batch == 12 and found.dense_bytes == (32 + 4) * 4
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert int(model.optimizer.iterations) == 0
    assert found.footprint is not None and found.footprint.states >= 2 * found.dense_bytes
    assert not found.one_set  # each replica has all weights, and updates them
    assert "1 layers that can be cut apart" in found.unpiped
    sharded = [each for each in answer.plan.tried if each.strategy == SHARDED]
    assert sharded and all(each.hosts == 1 for each in sharded)


def test_a_keras_model_of_no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning does not run its fit, and leaves Keras' own fit in place."""
    keras = pytest.importorskip("keras")
    if keras.config.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(4, activation="softmax")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy")
    own, before = type(model).fit, [w.copy() for w in model.get_weights()]
    monkeypatch.delattr(sg, "plan", raising=False)  # as after a mere `import stratagem as sg`
    answer = sg.plan(model, tuple(part.numpy() for part in data()), hosts=2)
    assert answer.plan.profile.batch == 12
    assert "is a BatchNormalization" in answer.plan.profile.unpiped
    assert int(model.optimizer.iterations) == 0 and type(model).fit is own
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"link": "0Gbit"}, "more than 0"),
        ({"latency": "soon"}, "'soon'"),
        ({"hosts": 0}, "hosts"),
        ({"most": 0}, "1 or more"),
        ({"gpus_per_host": 0}, "gpus_per_host is 0"),
        ({"most": 2.5}, "at most 2.5 replicas"),
        ({"link": [1]}, r"link is \[1\]"),
        ({"latency": True}, "latency is True"),
        ({}, "say how it is trained"),
        ({"loss": cross_entropy}, "say how it is trained"),
    ],
)
def test_misuse_is_one_sentence(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sg.plan(nn.Linear(8, 4), data(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "cross_entropie"}, 'no loss "cross_entropie"'),
        ({"optimizer": "adamant"}, 'no optimizer "adamant"'),
        ({"loss": nn.CrossEntropyLoss}, "give an instance of it"),
        ({"loss": 3}, "loss=3 is not callable"),
        ({"optimizer": 3}, "gives no torch optimizer"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "none of this Linear's"),
    ],
)
def test_what_compile_refuses_and_other_parameters(options: dict[str, object], said: str) -> None:
    net = nn.Linear(8, 4)
    given = {"loss": cross_entropy, "optimizer": torch.optim.SGD(net.parameters()), **options}
    with pytest.raises(UsageError, match=said):
        sg.plan(net, data(), **given)  # type: ignore[arg-type]


def test_only_models_and_pairs() -> None:
    with pytest.raises(UsageError, match="not a str"):
        sg.plan("resnet", data())
    model = sg.Model(nn.Linear(8, 4))
    model.compile("sgd", "cross_entropy")
    with pytest.raises(UsageError, match=r"\(x, y\)"):
        sg.plan(model, data()[0])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(a + b)
        return out


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_inputs_are_no_examples(kind: type) -> None:
    model = sg.Model(Pair())
    model.compile("sgd", "cross_entropy")
    x, y = data()
    assert sg.plan(model, (kind([x, x]), y), hosts=2).plan.profile.batch == 12


def test_several_inputs_of_keras() -> None:
    keras = pytest.importorskip("keras")
    if keras.config.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    a, b = keras.Input((8,)), keras.Input((8,))
    model = keras.Model([a, b], keras.layers.Dense(4, activation="softmax")(a + b))
    x, y = (part.numpy() for part in data())
    with pytest.raises(UsageError, match="compile the model"):
        sg.plan(model, ([x, x], y))
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert sg.plan(model, ([x, x], y), hosts=2).plan.profile.batch == 12


def planned(net: nn.Module, batch: object) -> int:
    params = [*net.parameters()] or [nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    return sg.plan(net, batch, loss=cross_entropy, optimizer=optimizer, hosts=2).plan.profile.batch


class Fits(nn.Linear):
    def fit(self, *args: object, **options: object) -> None:
        raise AssertionError("its own fit was called")


def test_a_module_takes_numpy_and_its_own_fit_is_let_alone() -> None:
    x, y = data()
    assert planned(Fits(8, 4), (x.numpy(), y.numpy())) == 12


@pytest.mark.parametrize(
    ("net", "batch", "said"),
    [
        (nn.ReLU(), data(), "no parameter"),
        (nn.LazyLinear(4), data(), "lazy layers"),
        (nn.Linear(8, 4), data()[0], "not x alone"),
        (nn.Linear(8, 4), (*data(), 1), "a pair"),
        (nn.Linear(8, 4), data()[0].numpy(), "not x alone"),
        (nn.Linear(8, 4), (data()[0], data(5)[1]), "here are 5 and 12 rows"),
    ],
)
def test_a_module_that_cannot_be_planned_for(net: nn.Module, batch: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(net, batch)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    answer = sg.plan(net, data(), loss=cross_entropy, optimizer=optimizer, hosts=2)
    with pytest.raises(UsageError, match="cannot be written"):
        answer.save(str(tmp_path / "no folder" / "plan.json"))


def test_it_can_be_called_whichever_way_it_was_found() -> None:
    """The package and its function share a name."""
    code = (
        "import stratagem.plan.cost, stratagem.plan as p, stratagem as sg\n"
        "assert callable(p) and callable(sg.plan) and sg.plan.cost is stratagem.plan.cost\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
