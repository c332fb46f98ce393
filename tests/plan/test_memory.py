"""A model that does not fit is told so before anybody is killed for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from stratagem.errors import UsageError
from stratagem.plan import measure
from stratagem.plan.memory import available, least


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
    [(lambda p: torch.optim.SGD(p, lr=0.1), 1), (torch.optim.Adam, 3),
     (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2)],
    ids=["sgd", "adam", "momentum"],
)  # fmt: skip
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
        measure.profile(net, batch, loss=nn.functional.mse_loss, optimizer=optimizer)


def test_a_crowd_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = torch.zeros(4, 100), torch.zeros(4, 100)
    monkeypatch.setattr(measure, "counts", lambda: [2, 4, 8])
    monkeypatch.setattr(measure, "available", lambda: 10100 * 4 * 2 * 5)
    tried: list[int] = []
    monkeypatch.setattr(measure, "crowd", lambda trial, given, many: tried.extend(many) or ())
    said: list[str] = []
    measure.profile(
        net, batch, loss=nn.functional.mse_loss, optimizer=optimizer, steps=2, crowded=True,
        say=said.append,
    )  # fmt: skip
    assert tried == [2, 4] and any("8 replicas at once are not tried" in line for line in said)
