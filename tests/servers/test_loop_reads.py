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

import stratagem as sg
from stratagem.errors import StratagemError
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
            loss: Any = F.mse_loss(out, y) + F.mse_loss(out, target(x)) * 0.9**steps
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


def accumulated(where: Any) -> None:
    module, optimizer, loader = prepared(where)
    for number, (x, y) in enumerate(loader):
        (F.mse_loss(module(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_with_spares_a_loop_is_told_and_gradients_of_several_batches_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker has parts of some batches only."""
    where = strategy("1 ps", "spares", 3)
    where.run(averaged, where)
    assert "not all of" not in caplog.text
    assert "a worker has parts of some batches only, so what the loop reads" in caplog.text
    with pytest.raises(StratagemError, match="added up over batches, and with spares"):
        where.run(accumulated, where)


def with_state(where: Any, fetch: bool) -> tuple[nn.Module, list[float], float]:
    """Read momenta after each step, and shrink weights by an epoch before a checkpoint."""
    module, optimizer, loader = prepared(where, momentum=0.9)
    seen, gradients = [], 0.0
    for _ in range(3):
        for x, y in loader:
            loss: Any = F.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            if fetch:
                optimizer.state_dict()
            if module.weight in optimizer.state:
                seen.append(float(optimizer.state[module.weight]["momentum_buffer"].sum()))
            if sg.current_replica().count == 1:
                gradients += float(module.weight.grad.sum())
            optimizer.zero_grad()
        with torch.no_grad():
            module.weight.mul_(0.5)
        optimizer.state_dict()
    return module, seen, gradients


@pytest.mark.parametrize("workers", [1, 2])
def test_state_and_gradients_after_a_step_are_those_of_one_device(workers: int) -> None:
    where = strategy("2 ps", "synchronous", workers)
    plain, seen, gradients = with_state(None, True)
    for mine, my_seen, my_gradients in where.run(with_state, where, True):
        assert apart(mine, plain) < 1e-5
        assert len(seen) == 9 and my_seen == pytest.approx(seen, abs=1e-5)
        if workers == 1:
            assert my_gradients == pytest.approx(gradients, abs=1e-5)


@pytest.mark.parametrize("rule", ["synchronous", "asynchronous"])
def test_state_that_the_servers_have_is_not_read_unfetched(rule: str) -> None:
    where = strategy("1 ps", rule, 1)
    with pytest.raises(sg.NotDistributable, match="which have gone on"):
        where.run(with_state, where, False)
