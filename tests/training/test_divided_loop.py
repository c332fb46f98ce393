"""A custom loop through divided layers: what `test_staged_loop.py` does not test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from tests.strategies.test_pipeline import doubles
from tests.support import cpus, distance
from tests.training.test_staged_loop import both

pytestmark = pytest.mark.timeout(120)


class Normed(nn.Module):
    """Statistics that are divided, and some that are not; dropout of divided values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.norm_a = nn.Conv1d(2, 7, 2), nn.BatchNorm1d(7)
        self.head, self.norm_b = nn.Linear(14, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.relu(self.norm_a(self.a(x.view(-1, 2, 3)))))
        out: Tensor = self.norm_b(self.head(h.flatten(1)))
        return out


def statistics(prepare: Callable[..., Any], model: Any, path: Path | None = None) -> Any:
    """In eval between steps, and behind a forward that the first process runs alone."""
    torch.manual_seed(3)
    x, y = doubles(20)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    model, optimizer, _ = prepare(model, optimizer, None)
    seen = []
    for step in range(6):
        F.cross_entropy(model(x[step : step + 9]), y[step : step + 9]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.train(step == 2)
            seen.append(model(x).sum())
            model.train()
            if step == 3:
                model.norm_b.running_var.fill_(2.0)
                model.norm_a.running_mean.fill_(0.1)
            if step == 4:  # frozen statistics, with gradients
                model.norm_b.eval()
    if path is not None:
        torch.save([model.state_dict(), optimizer.state_dict()], path)
    return torch.stack(seen), copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("devices", [2, 3])
def test_statistics_and_dropout_of_one_device(devices: int, tmp_path: Path) -> None:
    """To the draw; and what was saved goes on without a strategy."""

    def loop(prepare: Callable[..., Any], model: Any) -> Any:
        return statistics(prepare, model, tmp_path / f"{isinstance(prepare, type(loop))}.pt")

    with sg.TensorParallelStrategy(cpus(devices)) as on:
        (seen, state), (ours, other) = both(loop, Normed().double(), on)
    assert torch.allclose(seen, ours, 1e-12, 1e-12)
    for name, value in state.items():
        assert torch.allclose(value, other[name], 1e-12, 1e-12), name
    models = []
    for name in ("True", "False"):  # of one device, and of the strategy's bound method
        weights, state = torch.load(tmp_path / f"{name}.pt")
        model = Normed().double()
        model.load_state_dict(weights)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        optimizer.load_state_dict(state)
        torch.manual_seed(4)
        F.cross_entropy(model(doubles(9)[0]), doubles(9)[1]).backward()
        optimizer.step()
        models.append(model)
    assert distance(*models) < 1e-12


def test_mixed_precision_and_parts_of_parameters(tmp_path: Path) -> None:
    """In bfloat16 as one device does it, which rounds otherwise; a process steps its part."""

    def loop(prepare: Callable[..., Any], model: Any) -> Any:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, _ = prepare(model, optimizer, None)
        x, y = doubles(16)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x.float()), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
    one = copy.deepcopy(net)
    expected = loop(lambda *given: given, one)
    with sg.TensorParallelStrategy(cpus(2)) as on:

        def run() -> Any:
            mine = copy.deepcopy(net)
            return loop(on.prepare, mine), mine

        (found, other), _ = on.run(run)
    assert found == pytest.approx(expected, rel=0.02)
    assert distance(one, other) < 0.02 < distance(one, net)


def test_refusals() -> None:
    def loop(optimizer: Any, act: Any = None, **more: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
        model, made, _ = on.prepare(model, optimizer(model[0].parameters(), lr=0.1), **more)
        if act is add_first:
            made.add_param_group({"params": model[2].parameters()})
        if act is not None:
            act(model)
        if act is add:
            made.add_param_group({"params": model[2].parameters()})
            made.step()

    def add(model: Any) -> None:
        model(torch.ones(5, 6)).sum().backward()

    def add_first(model: Any) -> None:
        model(torch.ones(5, 6))

    sgd = torch.optim.SGD
    draw = lambda m: m(torch.randn(5, 6, requires_grad=True))  # noqa: E731
    with sg.TensorParallelStrategy(cpus(2)) as on:
        for given, words in (
            (lambda: loop(torch.optim.Adafactor), "Adafactor may look at whole parameters"),
            (lambda: loop(sgd, resume="run/"), "parts of an optimizer's state"),
            (
                lambda: loop(sgd, add),
                "add the parameters before prepare.*other parameters behind prepare",
            ),
            (lambda: loop(sgd, add_first), "other parameters behind prepare"),
            (lambda: loop(sgd, draw), "an input of the model requires a gradient"),
        ):
            with pytest.raises(sg.NotDistributable, match=words):
                on.run(given)
