"""The figures of trainings in the folder of a run: generations, joins and losses."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.figures import recorder
from stratagem.figures.run_folder import RunFolder
from stratagem.launch.report_command import page
from tests.strategies.test_elastic import Kills, net, rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(recorder.VARIABLE, str(tmp_path))
    monkeypatch.setattr(recorder, "_recorders", {})
    monkeypatch.setattr("stratagem.training.step_figures.PERIOD", 0.0)
    return tmp_path


def read(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.read()
    return run


def test_a_replica_that_is_killed_and_comes_back(folder: Path) -> None:
    with closing(sg.MirroredStrategy(["cpu:0", "cpu:1"], elastic=True)) as strategy:
        with strategy.scope():
            model = sg.Model(net())
            model.compile("sgd", "cross_entropy")
        kills = Kills([3])
        kills.strategy = strategy
        model.fit(*rows(), batch_size=32, epochs=2, verbose=0, callbacks=[kills])
        run = read(folder)
    told = [(each["event"], each["task"]) for each in run.events]
    assert told.index(("fault", "replica 1")) < told.index(("join", "replica 1"))
    first, last = run.tasks["replica 0"].lines[0], run.tasks["replica 0"].lines[-1]
    assert (first["generation"], last["generation"]) == (0, 1)
    assert run.tasks["replica 1"].restarts == 1
    text = page(run)
    assert "generation" in text and "join: " in text and "Loss, by epoch" in text


def _loop(strategy: Any) -> None:
    x, y = rows()
    model = net()
    model, optimizer, loader = strategy.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x, y), 32)
    )
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        strategy.mean(loss)
        strategy.mean(1e9)  # no loss
        optimizer.step()
        optimizer.zero_grad()


def test_the_loss_of_a_custom_loop_that_asks_for_it(folder: Path) -> None:
    with closing(sg.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy:
        strategy.run(_loop, strategy)
        run = read(folder)
    losses = [line["loss"] for line in run.tasks["replica 0"].lines if "loss" in line]
    assert len(losses) > 3 and all(0.5 < loss < 5 for loss in losses)
    assert "Loss, by time" in page(run)
