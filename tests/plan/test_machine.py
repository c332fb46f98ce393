"""Measurements of this machine: memory, and a server's update."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from stratagem.errors import UsageError
from stratagem.plan import measure
from stratagem.plan.configuration import SERVERS, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.hardware import Hardware
from stratagem.plan.host_memory import available, least
from stratagem.plan.machine import update_seconds
from stratagem.plan.notebook import profile as measured
from stratagem.plan.report import warnings
from tests.clock import unless_late
from tests.plan.support import IDEAL, profile


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


MEMINFO = "MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable:    50 kB\n"


def test_the_machine_or_the_group_whichever_is_less(tmp_path: Path) -> None:
    assert available(tmp_path) is None
    write(tmp_path, proc__meminfo=MEMINFO)
    assert available(tmp_path) == 50 << 10
    group = {"sys__fs__cgroup__memory_dot_max": "max", "sys__fs__cgroup__memory_dot_current": "1"}
    write(tmp_path, **group)
    assert available(tmp_path) == 50 << 10
    write(tmp_path, sys__fs__cgroup__memory_dot_max="2001")
    assert available(tmp_path) == 2000
    (tmp_path / "proc/meminfo").unlink()
    assert available(tmp_path) == 2000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_here_there_is_some() -> None:
    left = available()
    assert left is not None and left > 1 << 20


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 1),
        (torch.optim.Adam, 3),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2),
    ],
    ids=["sgd", "adam", "momentum"],
)
def test_what_a_training_takes_at_least(make: object, times: int) -> None:
    net = nn.Linear(10, 10)
    assert least(net, make(net.parameters())) == 110 * 4 * times  # type: ignore[operator]
    assert least(net.requires_grad_(False), None) == 0


def test_too_large_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(net.parameters())
    batch = torch.zeros(4, 100), torch.zeros(4, 100)
    monkeypatch.setattr(net, "forward", lambda x: pytest.fail("it was run"))
    monkeypatch.setattr(measure, "available", lambda: 4 * 10100 * 4 - 1)
    with pytest.raises(UsageError, match="Linear does not fit in this device's memory with 4"):
        measured(net, batch, loss=nn.functional.mse_loss, optimizer=optimizer)


def test_a_crowd_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = torch.zeros(4, 100), torch.zeros(4, 100)
    monkeypatch.setattr(measure, "counts", lambda wanted: [2, 4, 8])
    monkeypatch.setattr(measure, "available", lambda: 10100 * 4 * 2 * 5)
    tried: list[int] = []
    monkeypatch.setattr(measure, "crowd", lambda trial, given, many: tried.extend(many) or ())
    said: list[str] = []
    measured(
        net,
        batch,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        steps=2,
        crowded=True,
        say=said.append,
    )
    assert tried == [2, 4] and any("8 replicas at once are not tried" in line for line in said)


MACHINE = Hardware(hosts=3, link=1e15, latency=0.0, update=1e15)


class Own(torch.optim.SGD):
    """An optimizer that is no class of torch.optim."""


def seconds(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    params = list(net.parameters())
    found = update_seconds(params, range(len(params)), optimizer)
    assert found is not None
    return found


def test_many_small_tensors_take_their_time() -> None:
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(60)])
    slow = seconds(net, torch.optim.Adam(net.parameters(), foreach=False, fused=False))
    one = nn.Linear(8, 8)
    fast = seconds(one, torch.optim.Adam(one.parameters(), foreach=False))
    unless_late(slow > 10 * fast, f"{slow:.2g} s for 60 layers, {fast:.2g} s for one")
    assert all(p.grad is None for p in net.parameters())


def test_of_large_models_a_part_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    whole = seconds(net, optimizer)
    monkeypatch.setattr("stratagem.plan.machine._MOST_ELEMENTS", 100_000)
    part = seconds(net, optimizer)
    unless_late(whole / 10 < part < whole * 10, f"{part:.2g} s instead of {whole:.2g}")


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
    """An optimizer that takes one device half of its step takes a server time, too."""
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
