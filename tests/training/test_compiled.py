"""A module from torch.compile trains as on one device, on replicas and with servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))


def compiled() -> Any:
    """Run Dynamo's graph as it is, without a compiler."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return torch.compile(net, backend="eager")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def loop(on: sg.Strategy | None, loss: Any = nn.functional.cross_entropy) -> list[Tensor]:
    """Two epochs, written by hand."""
    model = compiled()
    optimizer: Any = sgd(model.parameters())
    loader: Any = DataLoader(TensorDataset(X, Y), batch_size=20)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def fitted(on: sg.Strategy) -> list[Tensor]:
    with on.scope():
        model = sg.Model(compiled())
        model.compile(optimizer=sgd, loss="cross_entropy")
    model.fit(X, Y, epochs=2, batch_size=20, shuffle=False, verbose=0)
    return [p.detach() for p in model.module.parameters()]


def test_jit_compile_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of torch.compile trains, with the numbers of a loop by hand."""
    plain, seen = compiled().get_submodule("_orig_mod"), []

    def stand_in(module: nn.Module) -> nn.Module:
        module.register_forward_hook(lambda *_: seen.append(1))
        return module

    monkeypatch.setattr(torch, "compile", stand_in)
    with sg.MirroredStrategy(["cpu:0"]).scope():
        model = sg.Model(plain)
        model.compile(optimizer=sgd, loss="cross_entropy", jit_compile=True)
    model.fit(X, Y, epochs=2, batch_size=20, shuffle=False, verbose=0)
    monkeypatch.undo()
    pairs = zip(loop(None), model.module.parameters(), strict=True)
    assert len(seen) == 6 and all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


@pytest.fixture(scope="module", params=["replicas", "servers"])
def strategy(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made: sg.Strategy
    if request.param == "replicas":
        made = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    else:
        cluster = sg.LocalCluster(workers=2, ps=1)
        made = sg.ParameterServerStrategy(cluster, updates=sg.Synchronous())
    yield made
    made.close()


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.timeout(180)
def test_fit_of_a_compiled_module_is_that_of_one_device(strategy: sg.Strategy) -> None:
    one = loop(None)
    assert apart(one, [p.detach() for p in compiled().parameters()]) > 1e-3
    assert apart(one, fitted(strategy)) < 1e-6


@pytest.mark.timeout(180)
def test_a_loop_over_a_compiled_module_is_that_of_one_device(strategy: sg.Strategy) -> None:
    assert apart(loop(None), strategy.run(lambda: loop(strategy))[0]) < 1e-6


@pytest.mark.timeout(180)
def test_a_compiled_loss_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    def by_hand(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def train(on: sg.Strategy | None) -> list[Tensor]:
        return loop(on, torch.compile(by_hand, backend="aot_eager"))

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as two:
        assert apart(loop(None), two.run(train, two)[0]) < 1e-6
    assert caplog.text.count("the loss ends in torch.compile, which cannot be read") == 1
    assert 'it is a sum, loss_reduction="sum"' in caplog.text
