"""The studies' speedups in simulated time are never above the number of workers."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from stratagem.plan.simulation.scenario import Work
from stratagem.plan.simulation.spread import Lognormal
from stratagem.wire.simulated import Topology

STUDIES = Path(__file__).parents[3] / "studies"


@pytest.mark.parametrize("workers", [1, 8, 64])
def test_of_asynchronous_workers_that_share_nothing(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (STUDIES, STUDIES / "sparse"):
        monkeypatch.syspath_prepend(str(folder))
    work, free = Work(Lognormal(0.1, 0.3)), Topology(1e9)
    found = import_module("virtual").speedup("asynchronous", 16, workers, work, free)
    assert workers * (1 - 1e-9) <= found <= workers * (1 + 1e-9)


@pytest.mark.parametrize(("way", "workers"), [("asynchronous, bf16", 8), ("all-reduce", 1)])
def test_of_the_headlines(way: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUDIES / "headlines"))
    monkeypatch.delitem(sys.modules, "study", raising=False)
    study = import_module("study")
    job = {
        "model": "translation",
        "way": way,
        "compute": "2016",
        "network": "2016",
        "workers": workers,
        "gbit": 1600,
    }
    assert 0.97 * workers < study.one(job)["speedup"] <= workers * (1 + 1e-9)
