"""Who leaves a training in good order stays in the job; who dies, or is replaced, does not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.strategies.parameters.trouble import failed, headline
from tests.served_support import apart, digits, net
from tests.strategies.parameters.fault_support import Counter, by_one
from tests.strategies.parameters.office import Office

pytestmark = pytest.mark.timeout(60)


def test_a_worker_that_leaves_before_the_others_keeps_its_lines() -> None:
    """It ends its loop while the chief is still at work, and takes part in the next training."""
    office = Office(3, staff=2)
    try:
        for _ in range(2):
            chief, other = (
                office.begin(counter, by_one(counter.parameters()), worker=i)
                for i, counter in enumerate((Counter(12), Counter(12)))
            )
            other.end()
            chief.worker.snapshot()  # so every server has carried out what came before
            for server in range(3):
                assert "host" in other.worker.lines.call(server, {"t": "host"}).header
            chief.end()
    finally:
        office.close()


def loop(where: Any) -> Any:
    """One's own; worker 0 takes longer to end than the others."""
    x, y, _, _ = digits()
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x[:96], y[:96]), batch_size=32)
    if where is not None:
        model, optimizer, loader = where.prepare(model, optimizer, loader)
    for rows, labels in loader:
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    if where is not None and sg.current_replica().index == 0:
        time.sleep(0.2)
    return model


def test_one_loop_after_the_other() -> None:
    strategy = sg.ParameterServerStrategy(
        sg.LocalCluster(workers=2, ps=2), updates=sg.Synchronous()
    )
    try:
        alone = loop(None)
        for _ in range(4):
            for model in strategy.run(loop, strategy):
                assert apart(model, alone) < 1e-5
    finally:
        strategy.close()


def test_no_traceback_is_announced_where_there_is_none() -> None:
    assert "traceback" not in str(failed("worker 1", ""))
    assert headline(failed("worker 1", "Traceback: x")).endswith("the others were stopped.")
    assert "its output" in str(failed("worker 1", "  "))
    assert str(failed("worker 1", "Traceback: x")).endswith("Its traceback:\n\nTraceback: x")
