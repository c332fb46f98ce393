"""The studies in a small form: they run, and what they rest on holds."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch


def load(name: str) -> ModuleType:
    """Under a name by which replicas find it, too."""
    return importlib.import_module(f"studies.{name}.study")


@pytest.mark.timeout(120)
def test_rules_under_stragglers() -> None:
    study = load("rules")
    found = study.study(True)
    runs = {run["arm"]: run for run in found["digits"]["runs"]}
    assert set(runs) == set(study.ARMS)
    # nobody is waited for, so more is done in the same time
    assert runs["synchronous"]["updates"] < runs["1 spare"]["updates"]
    assert runs["1 spare"]["updates"] < runs["3 spares"]["updates"]
    assert all(arm in study.report(found) for arm in study.ARMS)


@pytest.mark.timeout(120)
def test_stale_gradients() -> None:
    study = load("staleness")
    found = study.study(True)
    alone, crowd, mended = (
        next(r for r in found if (r["workers"], r["remedy"]) == which)
        for which in ((1, "none"), (16, "none"), (16, "scale by 1/sqrt(1+age)"))
    )
    assert alone["age"] == 0 < crowd["age"]
    assert crowd["accuracy"] < mended["accuracy"] <= alone["accuracy"] + 0.02
    assert "remedy, 16 workers" in study.report(found)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_split() -> None:
    """Every arm of a network trains the same: the losses are those of one device."""
    study = load("split")
    found = study.study(True)
    for kind in study.kinds(True):
        losses = {run["arm"]: run["loss"] for run in found["runs"] if run["kind"] == kind}
        assert set(losses) == set(study.arms(kind))
        assert all(loss == pytest.approx(losses[study.ONE], abs=1e-5) for loss in losses.values())
    assert study.COLUMNS in study.report(found)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_headlines() -> None:
    study = load("headlines")
    found = {run["way"]: run["speedup"] for run in study.study(True)}
    assert all(1 < value < 8 for value in found.values())
    assert found["servers, as then"] < found["servers, overlapped"] < found["asynchronous, bf16"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_fewer_bytes_and_fewer_meetings() -> None:
    study = load("bytes")
    found = {run["row"]: run for run in study.study(True)}
    dense = found["every step"]["bytes"]
    assert dense / found["int8"]["bytes"] == pytest.approx(4, rel=0.02)
    assert dense / found["DiLoCo 20, AdamW"]["bytes"] == pytest.approx(20, rel=0.02)
    assert all(run["check"][0] < 4 for run in found.values())  # of log(128) = 4.85
    assert "times fewer bytes" in study.report(list(found.values()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("task", ["clothes", "text"])
def test_gradients_of_all_workers_come_from_one_call(task: str) -> None:
    """Those that each would find by itself, in its own model."""
    study = load("bytes")
    dice = torch.Generator().manual_seed(0)
    pictures = torch.randn(32, 1, 28, 28, generator=dice)
    x = study.patches(pictures)
    if task == "text":
        x = torch.randint(128, (32, study.CONTEXT), generator=dice)
    y = torch.randint(10, (32,), generator=dice)
    workers = study.Workers(study.TASKS[task][1](1), study.common.Split(x, y, x, y, x, y))
    with torch.no_grad():  # they have gone apart
        for rank, copy in enumerate(workers.copies):
            for p in copy.parameters():
                p.add_(0.01 * rank)
    rows = torch.randperm(32, generator=dice)
    workers.gradients(0, rows)
    for copy, mine in zip(workers.copies, rows.split(4), strict=True):
        loss = torch.nn.functional.cross_entropy(copy(x[mine]), y[mine]) / study.WORKERS
        own = torch.autograd.grad(loss, list(copy.parameters()))
        for p, alone in zip(copy.parameters(), own, strict=True):
            torch.testing.assert_close(p.grad, alone)
    if task == "clothes":
        made = study.picture_model(1)
        first, second = made[0], made[2]
        out = torch.conv2d(pictures, first.weight.view(16, 1, 7, 7), first.bias, 3).relu()
        out = torch.conv2d(out, second.weight, second.bias, second.stride).relu()
        torch.testing.assert_close(made(x), made[5](out.movedim(1, -1).flatten(1)))


def test_who_never_got_there_took_longest() -> None:
    middle = load("rules").common.middle
    assert middle([3.0, None, 1.0, 2.0, 4.0]) == "3 (1 to 4, 1 of 5 never)"
    assert middle([3.0, None, None, None, 4.0]) == "never (3 to 4, 3 of 5 never)"
    assert middle([None, None]) == "never"
    assert middle([1.0, 2.0, 3.0]) == "2 (1 to 3)"


@pytest.mark.timeout(120)
def test_the_best_three_together() -> None:
    study = load("ensemble")
    found = study.study(True)[0]
    assert found["validation"] == sorted(found["validation"], reverse=True)
    assert len(found["members"]) == 3 < len(found["settings"]) == 4
    assert all(0.2 < found[which] <= 1 for which in ("mean", "vote", "all"))
    assert study.settings(1, 3) == study.settings(1, 3) != study.settings(2, 3)
    worse = {**found, "members": [0.9, 0.8, 0.7], "mean": 0.85, "vote": 0.8, "all": 0.95}
    said = study.report([worse])
    assert "the three to the first: median -0.0500" in said
    assert "better than each of them on the test set: 0 of 1" in said
