"""Simulated replicas have the weights of real replicas under each wire and cadence."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.plan.simulate import simulate
from stratagem.plan.simulation.replica_training import (
    ThreadCollective,
    all_at_once,
    train_replicas,
)
from stratagem.plan.simulation.scenario import Scenario, Work
from stratagem.plan.simulation.spread import Constant, Lognormal
from stratagem.plan.simulation.training import Data
from stratagem.wire.simulated import Topology
from tests.strategies.test_compressed import rows
from tests.support import mlp, moved, strategy

pytestmark = pytest.mark.timeout(120)
BATCH, EPOCHS, SEED, RATE = 16, 2, 3, 1e5
#: both once here; others are theirs in tests/strategies against the formulas
CASES: dict[str, dict[str, Any]] = {
    "int8": {"wire": sg.Int8(block=8)},
    "local": {"sync": sg.LocalSteps(3)},
    "top-k": {"wire": sg.TopK(0.3)},
    "low rank": {"wire": sg.PowerSGD(1)},
    "DiLoCo": {"sync": sg.DiLoCo(4, fragments=2, wire=sg.Int8(block=8))},
    "ring": {"sync": sg.Gossip()},
}


def given() -> Data:
    return Data(*rows(), batch_size=BATCH, epochs=EPOCHS)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def scenario(workers: int = 2, **options: Any) -> Scenario:
    work, topology = Work(Constant(0.01)), Topology(RATE, latency=1e-5)
    return Scenario(workers, 1, work, topology, servers=0, seed=SEED, **options)


def looped(made: Any) -> list[torch.Tensor]:
    """The same batches in a custom loop on real replicas."""
    data, module = given(), mlp().double()
    order = torch.cat([data.order(SEED, epoch + 1) for epoch in range(EPOCHS)])
    optimizer = sgd(module.parameters())
    for epoch in range(EPOCHS):
        picked = order[epoch * len(data.x) : (epoch + 1) * len(data.x)]
        if not epoch:
            loader = DataLoader(TensorDataset(data.x[picked], data.y[picked]), batch_size=BATCH)
            model, optimizer, shares = made.prepare(module, optimizer, loader)
        else:
            loader = DataLoader(TensorDataset(data.x[picked], data.y[picked]), batch_size=BATCH)
            shares = made.prepare(loader)
        for x, y in shares:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        made.meet()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["int8", "local"])
def test_a_simulated_training_is_the_real_one(name: str) -> None:
    with strategy(2, cross_device_ops="ring", **CASES[name]) as made:
        real = made.run(looped, made)[0]
    module = mlp().double()
    train_replicas(
        scenario(), module, sgd(module.parameters()), F.cross_entropy, given(), **CASES[name]
    )
    pairs = zip(module.parameters(), real, strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12
    assert moved(mlp().double(), module)


@pytest.mark.parametrize("name", CASES)
def test_each_trains_repeats_and_takes_its_time(name: str) -> None:
    found = []
    for _ in range(2):
        module = mlp().double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        score = lambda m: -float(F.cross_entropy(m(given().x), given().y))  # noqa: E731
        made = (scenario(3), module, optimizer, F.cross_entropy, given(), score)
        trained = train_replicas(*made, **CASES[name])
        found.append([p.detach() for p in module.parameters()])
    assert all(map(torch.equal, *found))
    assert trained.curve[-1][2] > trained.curve[0][2] and len(trained.curve) == EPOCHS + 1
    steps = given().batches * EPOCHS
    assert trained.run.seconds > steps * 0.01
    if name not in ("ring", "top-k", "low rank"):  # a ring sends more; small tensors, as much
        assert trained.run.seconds < whole()


@cache
def whole() -> float:
    """Seconds of the same training without compression."""
    dense = mlp().double()
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    return train_replicas(scenario(3), dense, optimizer, F.cross_entropy, given()).run.seconds


def test_dense_replicas_take_the_time_of_the_formula() -> None:
    module = mlp().double()
    optimizer = sgd(module.parameters())
    trained = train_replicas(scenario(), module, optimizer, F.cross_entropy, given())
    numbers = sum(p.numel() for p in module.parameters()) + 2 + 4  # the notes: two, and who has one
    each = 0.01 + 2 * 1 / 2 * 8 * numbers / RATE + 2 * 1 * 1e-5
    assert trained.run.seconds == pytest.approx(len(trained.run.updates) * each)


@pytest.mark.parametrize("wire", [None, sg.Int8(block=8)], ids=repr)
def test_what_is_sent_beside_training_takes_no_time_of_it(wire: Any) -> None:
    """A fragment takes an update and a half: two updates hide it, one update hides a part."""

    def seconds(overlap: int) -> float:
        module = mlp().double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        slow = Topology(8 * sum(p.numel() for p in module.parameters()) / 0.015, latency=0.0)
        made = (replace(scenario(), topology=slow), module, optimizer, F.cross_entropy)
        sync = sg.DiLoCo(3, overlap=overlap, wire=wire)
        run = train_replicas(*made, Data(*rows(96), batch_size=16, epochs=1), sync=sync).run
        return run.updates[-2]  # of six: before the meeting at the end of the epoch

    once = 0.015 if wire is None else seconds(0) - 0.05
    assert seconds(0) == pytest.approx(0.05 + once)
    assert seconds(1) == pytest.approx(0.05 + max(0.0, once - 0.01))
    assert seconds(2) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "sync",
    [
        sg.LocalSteps(3, wire=sg.Int8(block=8)),
        sg.DiLoCo(4, fragments=2, overlap=1),
        sg.DiLoCo(6, fragments=2, overlap=2, wire=sg.Int8(block=8)),
    ],
    ids=repr,
)
def test_without_gradients_it_takes_the_same_time(sync: Any) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))
    work = Work(Lognormal(0.01, 0.3), push=4 * 2 * 16 * 16)
    made = replace(scenario(3, sync=sync), work=work, steps=8)
    data = Data(torch.randn(24, 16), torch.randn(24, 16), batch_size=3, epochs=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trained = train_replicas(made, module, optimizer, F.mse_loss, data, sync=sync).run
    run = simulate(made)
    assert run.seconds == pytest.approx(trained.seconds, rel=0.01)
    assert run.seconds > 8 * 0.01


def test_refusals() -> None:
    module = mlp()
    optimizer = torch.optim.Adam(module.parameters())
    made = (module, optimizer, F.cross_entropy, given())
    with pytest.raises(sg.UsageError, match="with servers use train"):
        train_replicas(Scenario(2, 1, Work(Constant(0.1)), Topology(1e9)), *made)
    with pytest.raises(sg.NotDistributable, match="Adam divides by"):
        train_replicas(scenario(), *made, wire=sg.TopK(0.1))


def test_replicas_go_in_turn_from_one_meeting_to_the_next() -> None:
    """Threads that contend for the interpreter take several times as long."""
    going: list[int] = []

    def act(collective: ThreadCollective) -> list[int]:
        for _ in range(3):
            going.append(collective.rank)
            time.sleep(0.002)
            assert going.pop() == collective.rank and not going
            told = collective.gather_bytes(torch.tensor([collective.rank]))
        return [int(each) for each in told]

    assert all_at_once(4, Topology(RATE), act) == [[0, 1, 2, 3]] * 4


@pytest.mark.timeout(20)
def test_an_error_of_one_replica_ends_all() -> None:
    def act(collective: ThreadCollective) -> None:
        for step in range(5):
            if (step, collective.rank) == (3, 2):
                raise ValueError("the third")
            collective.barrier()

    for _ in range(20):
        with pytest.raises(ValueError, match="the third"):
            all_at_once(4, Topology(RATE), act)
