"""What a custom loop with servers reads after a step is new, as on one device, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.served_support import apart, close_all, strategy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    close_all()


def prepared(where: Any, kind: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any, Any]:
    """A line and nine rows, in batches of four, four and one."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    x = torch.randn(9, 3)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + 1), batch_size=4)
    optimizer = kind(module.parameters(), lr=0.1, **options)
    return (
        (module, optimizer, loader) if where is None else where.prepare(module, optimizer, loader)
    )


def averaged(where: Any) -> tuple[list[nn.Module], int]:
    """Average the weights after each step; one of the averages is a target in the loss."""
    module, optimizer, loader = prepared(where)
    target, average = copy.deepcopy(module).requires_grad_(False), AveragedModel(module)
    moving, steps = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5)), 0  # type: ignore[no-untyped-call]
    for _ in range(3):
        for x, y in loader:
            out = module(x)
            loss: Any = F.mse_loss(out, y) + F.mse_loss(out, target(x)) / (steps + 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            average.update_parameters(module)
            moving.update_parameters(module)
            for mine, new in zip(target.parameters(), module.parameters(), strict=True):
                mine.lerp_(new.data, 0.5)
    return [module, target, average.module, moving.module], steps


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("place", ["1 ps", "2 ps"])
def test_averages_of_weights_after_each_step_are_those_of_one_device(
    place: str, workers: int
) -> None:
    where = strategy(place, "synchronous", workers)
    plain, steps = averaged(None)
    for mine, counted in where.run(averaged, where):
        assert counted == steps  # also on a worker without rows of the last batch
        assert max(map(apart, mine, plain)) < 1e-5


def test_one_worker_reads_new_weights_by_any_rule() -> None:
    where = strategy("1 ps", "asynchronous", 1)
    ((mine, _),) = where.run(averaged, where)
    assert max(map(apart, mine, averaged(None)[0])) < 1e-5
