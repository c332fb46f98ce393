"""The parts of a step's time are counted where they occur, at almost no cost."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.figures import recorder
from stratagem.figures.meter import METER, loading
from stratagem.rules.slowness import STEPS
from stratagem.training.step_figures import Line, SlowWatch, StepFigures
from tests.clock import in_time, unless_late


class SlowNet(nn.Module):
    """Takes longer on the second replica."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002 + 0.04 * sg.current_replica().index)
        out: torch.Tensor = self.layer(x)
        return out


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4), torch.ones(1)


def test_a_replica_of_this_process_is_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(recorder.VARIABLE, str(tmp_path))
    monkeypatch.setattr(recorder, "_recorders", {})
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = sg.Model(SlowNet())
        model.compile("sgd", "mse")
    with caplog.at_level(logging.WARNING, "stratagem"):
        model.fit(DataLoader(Rows(), batch_size=8), epochs=1, verbose=0)
    slow = [each.message for each in caplog.records if " is slow: " in each.message]
    assert any(line.startswith("replica 1 ") and "it computes for" in line for line in slow)
    unless_late(len(slow) == 1, slow)
    for i in (0, 1):
        text = (tmp_path / f"replica-{i}.jsonl").read_text().splitlines()
        lines = [line for each in text if (line := json.loads(each)).get("steps")]
        assert lines and all(line["examples"] == 4 for line in lines)
        waits = sum(line["wait"] for line in lines) / len(lines)
        unless_late((waits > 0.02) == (i == 0), (i, waits))


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="it is not counted here")
def test_a_task_that_queues_for_a_core_is_not_slow(caplog: pytest.LogCaptureFixture) -> None:
    """It shares one core with another program, and computes in each step as long as its peer."""
    told: list[Line] = []
    figures, cores = StepFigures("replica 1", told.append), os.sched_getaffinity(0)
    figures.step(4)
    os.sched_setaffinity(0, {core := min(cores)})
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            for _ in range(60):
                until = time.thread_time() + 0.005
                while time.thread_time() < until:
                    pass
                figures.step(4)
            figures._flush(time.perf_counter())
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()
    watch = SlowWatch()
    line = max(told, key=lambda each: float(each["steps"])) | {"steps": STEPS}
    assert line["compute"] > 1.6 * 0.005
    with caplog.at_level(logging.WARNING, "stratagem"):
        watch.hear({**line, "task": "replica 0", "compute": 0.005, "queue": 0.0})
        watch.hear(line)
        watch.hear(line)
    said = [each.message.partition(":")[0] for each in caplog.records]
    assert said == ["this machine has more work than cores"]


class Nap(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > -1e9:  # depends on values, so it is a layer of its own
            time.sleep(0.02)
        return x


def test_a_stage_is_compared_with_its_like(caplog: pytest.LogCaptureFixture) -> None:
    """Stages do different work: one that has more of it is not slow; one of two that have the same
    may be."""
    strategy = sg.PipelineStrategy(["cpu:0", "cpu:1"], microbatches=1, split=["1"])
    with strategy.scope():
        model = sg.Model(nn.Sequential(Nap(), nn.Linear(4, 1)))
        model.compile("sgd", "mse")
    with caplog.at_level(logging.WARNING, "stratagem"):
        model.fit(torch.ones(400, 4), torch.ones(400, 1), batch_size=8, epochs=2, verbose=0)
        assert not [each for each in caplog.records if " is slow: " in each.message]
        watch = SlowWatch()
        for row, seconds in enumerate([0.01, 0.05]):
            for stage, times in enumerate([1, 10]):
                line = dict.fromkeys(("load", "link", "wait"), 0.0) | {"steps": 30, "examples": 1}
                own = {"task": f"replica {2 * row + stage}", "stage": stage}
                watch.hear({**line, **own, "compute": seconds * times})
    slow = [
        each.message.split(" is ")[0] for each in caplog.records if " is slow: " in each.message
    ]
    assert slow == ["replica 2", "replica 3"]


def slowly(batches: int) -> Iterator[int]:
    for i in range(batches):
        time.sleep(0.002)
        yield i


def test_what_a_step_is_made_of() -> None:
    """Loading is not computing, waiting inside of loading is waiting, and the time of a pause
    between two epochs is none of these."""
    told: list[Line] = []
    figures = StepFigures("worker 0", told.append)

    def waited(source: Iterator[int]) -> Iterator[int]:
        for item in loading(source):  # a loader inside a loader counts once
            with METER.waiting():
                time.sleep(0.002)
            yield item

    for _ in range(2):
        for _ in loading(waited(slowly(30))):
            time.sleep(0.004)
            figures.step(8)
        time.sleep(0.5)
    figures._flush(time.perf_counter())
    seconds = {name: sum(each[name] * each["steps"] for each in told) for name in KINDS}
    steps = sum(each["steps"] for each in told)
    assert steps == 58  # the first of each epoch is none
    for name, least in KINDS.items():
        in_time(seconds[name] / steps, 4 * least, least=least)


#: seconds a step
KINDS = {"compute": 0.004, "load": 0.002, "wait": 0.002}


def test_it_costs_less_than_a_hundredth_of_a_step() -> None:
    """Of 10 ms; the quickest of several rounds, for other processes take time as well."""
    figures = StepFigures("worker 0", lambda line: None)

    def a_step() -> float:
        started = time.perf_counter()
        for _ in loading(range(1000)):
            for _ in range(4):
                METER.end_wait(METER.begin_wait())
            figures.step(8)
        return (time.perf_counter() - started) / 1000

    in_time(min(a_step() for _ in range(10)), 0.0001)
