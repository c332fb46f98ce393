"""Combinations of features: pipelines and modes, wires and checkpoints, elastic jobs and slices."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.frontends import steps
from stratagem.state.sliced import SlicedUpdate
from tests.support import distance, strategy

pytestmark = pytest.mark.timeout(120)


class Gated(nn.Module):
    """Has another order of layers in each mode of one part, so that a layer changes its stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.last, self.gate = nn.Linear(4, 1), nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x))
        if self.gate.training:
            return self.last(self.second(torch.tanh(self.third(x))))
        return self.last(self.third(torch.tanh(self.second(x))))


class CloseGate(sg.callbacks.Callback):
    """Puts the gate in evaluation mode for the first epoch only."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.module.gate.train(epoch > 0)


def gated(made: sg.Strategy) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    with made.scope():
        model = sg.Model(Gated())
        model.compile(torch.optim.Adam(model.module.parameters(), lr=0.02), "mse")
    y = x.sum(1, keepdim=True)
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[CloseGate()])
    taken = [float(model.optimizer.state[p]["step"]) for p in model.module.parameters()]
    return model.module, taken


def test_a_pipeline_that_is_split_again_keeps_the_state_of_its_optimizer() -> None:
    with closing(strategy(1)) as one, closing(_pipeline()) as two:
        (weights, taken), (found, there) = gated(one), gated(two)
    assert there == taken == [8.0] * 8
    assert distance(weights, found) < 1e-6


def _pipeline() -> sg.PipelineStrategy:
    return sg.PipelineStrategy(["cpu:0", "cpu:1"], microbatches=2, split=["third"])


def test_all_processes_of_a_pipeline_are_one_replica() -> None:
    with closing(_pipeline()) as made:
        assert made.run(lambda: made.num_replicas_in_sync) == [1, 1]


def test_what_a_wire_had_kept_is_not_dropped_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    for epochs, count, wire in ((1, 2, sg.TopK(0.3)), (2, 2, sg.TopK(0.3)), (3, 2, None)):
        caplog.clear()
        with closing(strategy(count, wire=wire)) as made:
            with made.scope():
                model = sg.Model(nn.Linear(4, 1))
                model.compile(torch.optim.SGD(model.module.parameters(), 0.01), "mse")
            options: dict[str, Any] = {
                "checkpoint": str(tmp_path / "run"),
                "resume": True,
                "verbose": 0,
            }
            model.fit(x, x.sum(1, keepdim=True), batch_size=8, epochs=epochs, **options)
        assert ("goes on without that" in caplog.text) == (wire is None)


def test_a_death_while_slices_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    class Dying(SlicedUpdate):
        def __init__(self, *args: Any) -> None:
            if not killed:
                pool: Any = made.replica_group._pool
                killed.append(pool.followers[0].pid)
                os.kill(killed[0], signal.SIGKILL)
                time.sleep(0.3)
            super().__init__(*args)

    monkeypatch.setattr(steps.Sliced, "sliced_update", Dying)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def train(given: sg.Strategy) -> nn.Module:
        torch.manual_seed(1)
        with given.scope():
            model = sg.Model(nn.Linear(4, 1))
            model.compile(torch.optim.SGD(model.module.parameters(), 0.05), "mse")
        y = x.sum(1, keepdim=True)
        model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
        return model.module

    with closing(sg.MirroredStrategy(["cpu:0", "cpu:1"], elastic=True)) as made:
        found = train(made)
    with closing(strategy(1)) as one:
        assert killed and distance(found, train(one)) < 1e-6


def test_one_replica_parts_a_model_from_those_that_left() -> None:
    """A model that was prepared for two replicas is prepared again for one."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    expected = torch.autograd.grad(model(x).mean(), model.weight)[0]

    def train(given: sg.Strategy) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        loader = DataLoader(TensorDataset(x), batch_size=8)
        prepared, optimizer, loader = given.prepare(model, optimizer, loader)
        for (rows,) in loader:
            prepared(rows).mean().backward()
        return prepared.weight.grad

    with closing(strategy(2)) as two:
        two.run(train, two)
    with closing(strategy(1)) as one:
        (found,) = one.run(train, one)
    assert torch.allclose(found, expected)
