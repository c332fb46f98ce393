"""Real gradients in simulated time: the result of one device, and equal runs for equal seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.errors import NotDistributable, UsageError
from stratagem.plan.simulation.scenario import Kill, Scenario, Work
from stratagem.plan.simulation.spread import Constant, Lognormal
from stratagem.plan.simulation.training import Data, TrainedRun, train
from stratagem.rules.updates import (
    Asynchronous,
    DelayCompensated,
    Drop,
    GapAware,
    LowerRate,
    Policy,
    ScaleDown,
    Synchronous,
    Updates,
)
from stratagem.wire.simulated import Topology

SEED = 3


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data(epochs: int = 2) -> Data:
    torch.manual_seed(1)
    x = torch.randn(70, 6)
    return Data(x, (x[:, :3] * 2).argmax(1), batch_size=16, epochs=epochs)


def run(
    updates: Updates, workers: int = 3, servers: int = 1, make: object = None, **given: object
) -> tuple[nn.Module, TrainedRun]:
    module = mlp()
    optimizer = (
        make(module.parameters())
        if callable(make)
        else torch.optim.SGD(module.parameters(), lr=0.1)
    )
    scenario = Scenario(
        workers,
        1,
        Work(Lognormal(0.1, 0.5), push=1e5),
        Topology(1e8, 1e-4),
        updates,
        servers,
        seed=SEED,
        **given,  # type: ignore[arg-type]
    )
    return module, train(scenario, module, optimizer, F.cross_entropy, data())


def by_hand(make: Callable[..., torch.optim.Optimizer]) -> nn.Module:
    """One device on the same global batches."""
    module, given = mlp(), data()
    optimizer = make(module.parameters())
    for epoch in (1, 2):
        order = given.order(SEED, epoch)
        for rows in order.split(given.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(module(given.x[rows]), given.y[rows]).backward()
            optimizer.step()
    return module


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)  # type: ignore[arg-type]


def adam(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 1), (5, 2)])
def test_synchronous_is_one_device(workers: int, servers: int, make: object) -> None:
    module, trained = run(Synchronous(), workers, servers, make)
    assert difference(module, by_hand(make)) < 1e-6  # type: ignore[arg-type]
    assert trained.run.stats.applied == 2 * 5 * workers


POLICIES: list[list[Policy]] = [
    [],
    [ScaleDown()],
    [LowerRate()],
    [Drop(older_than=2)],
    [DelayCompensated()],
    [GapAware()],
]


@pytest.mark.parametrize("policies", POLICIES, ids=str)
def test_one_asynchronous_worker_is_plain_training(policies: list[Policy]) -> None:
    module, trained = run(Asynchronous(staleness=policies), workers=1, make=sgd)
    assert difference(module, by_hand(sgd)) == 0.0
    assert trained.run.stats.staleness == {0: 10}


def test_many_asynchronous_workers_are_not() -> None:
    module, trained = run(Asynchronous(), workers=4, make=sgd)
    assert difference(module, by_hand(sgd)) > 1e-3
    assert max(trained.run.stats.staleness) > 0


def test_a_seed_gives_the_same_weights_again_bit_for_bit() -> None:
    def weights(**given: object) -> list[Tensor]:
        module, _ = run(Asynchronous(staleness=[ScaleDown()]), 5, 2, **given)
        return [p.detach().clone() for p in module.parameters()]

    faults = (Kill(2, 0.3, back=0.2),)
    pairs = zip(weights(faults=faults), weights(faults=faults), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_curve_grows_and_time_goes_on() -> None:
    module, given = mlp(), data(epochs=6)

    def accuracy(m: nn.Module) -> float:
        return float((m(given.x).argmax(1) == given.y).float().mean())

    scenario = Scenario(3, 1, Work(Constant(0.1)), Topology(1e9), Synchronous(), seed=SEED)
    trained = train(scenario, module, sgd(module.parameters()), F.cross_entropy, given, accuracy)
    seconds, updates, scores = zip(*trained.curve, strict=True)
    assert updates == (0, 5, 10, 15, 20, 25, 30)
    assert list(seconds) == pytest.approx([0.5 * i for i in range(7)])
    assert scores[-1] > max(0.8, scores[0]) and scores[-1] == accuracy(module)
    reached = trained.seconds_to(0.8)
    assert reached is not None and 0 < reached <= seconds[-1]
    assert trained.seconds_to(1.1) is None


def test_the_optimizer_that_was_given_stays_as_it_was() -> None:
    module = mlp()
    optimizer = adam(module.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    scenario = Scenario(2, 1, Work(Constant(0.1)), Topology(1e9), Asynchronous())
    train(scenario, module, optimizer, F.cross_entropy, data())
    assert optimizer.state_dict() == before


def test_refused() -> None:
    scenario = Scenario(2, 1, Work(Constant(0.1)), Topology(1e9))
    norm = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(NotDistributable, match="buffers"):
        train(scenario, norm, sgd(norm.parameters()), F.cross_entropy, data())
    with pytest.raises(UsageError, match="do not match"):
        Data(torch.zeros(3, 1), torch.zeros(2), 1, 1)
    with pytest.raises(UsageError, match="at least 1"):
        Data(torch.zeros(3, 1), torch.zeros(3), 0, 1)
