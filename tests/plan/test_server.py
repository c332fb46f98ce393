"""A server's update takes what the user's optimizer takes, not what a fast one would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stratagem.plan.configuration import SERVERS, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.hardware import Hardware
from stratagem.plan.measure import profile as measured
from stratagem.plan.report import warnings
from stratagem.plan.server import update_seconds
from tests.plan.support import IDEAL, profile

MACHINE = Hardware(hosts=3, link=1e15, latency=0.0, update=1e15)


class Own(torch.optim.SGD):
    """No class of torch.optim."""


def seconds(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    params = list(net.parameters())
    found = update_seconds(params, range(len(params)), optimizer)
    assert found is not None
    return found


def test_many_small_tensors_take_their_time() -> None:
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(60)])
    slow = seconds(net, torch.optim.Adam(net.parameters(), foreach=False, fused=False))
    one = nn.Linear(8, 8)
    assert slow > 10 * seconds(one, torch.optim.Adam(one.parameters(), foreach=False))
    assert all(p.grad is None for p in net.parameters())


def test_of_large_models_a_part_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    whole = seconds(net, optimizer)
    monkeypatch.setattr("stratagem.plan.server._MOST", 100_000)
    assert whole / 10 < seconds(net, optimizer) < whole * 10


def test_an_optimizer_that_no_server_takes() -> None:
    net = nn.Linear(2, 2)
    assert update_seconds(list(net.parameters()), [0, 1], Own(net.parameters(), lr=0.1)) is None
    assert update_seconds(list(net.parameters()), [], Own(net.parameters(), lr=0.1)) is None


def test_a_profile_has_it() -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(net.parameters())
    batch = torch.randn(4, 8), torch.randn(4, 4)
    found = measured(net, batch, loss=nn.functional.mse_loss, optimizer=optimizer, steps=3)
    assert found.server is not None and 0 < found.server < 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("servers", [1, 4])
def test_nobody_is_faster_than_his_optimizer(servers: int, asynchronous: bool) -> None:
    """What took one device half of its step is not free on a server."""
    two = Configuration(SERVERS, 2, servers=servers, asynchronous=asynchronous)
    for server in (None, 0.001, 0.03):
        slow = profile(optimizer=0.03, server=server)
        assert predict(slow, MACHINE, two, IDEAL).speedup <= 2 * (1 + 1e-6)
    slower = predict(profile(optimizer=0.03, server=0.24), MACHINE, two, IDEAL)
    assert slower.parts["the servers' update"] >= 0.24 / servers


def test_a_profile_says_why_no_server_takes_it() -> None:
    net = nn.Linear(8, 4)
    batch = torch.randn(4, 8), torch.randn(4, 4)
    made = measured(
        net, batch, loss=nn.functional.mse_loss, optimizer=Own(net.parameters(), lr=0.1), steps=3
    )
    assert "Own is not there" in made.unserved and made.server is None
    assert "without servers: a parameter server builds" in " ".join(warnings(made))
