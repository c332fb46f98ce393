"""A server's threads: several are tried where everybody waits for an update, else it has one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.rules.updates import Updates
from stratagem.state.partition import partition
from stratagem.state.recipe import describe
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.shard import Shard
from stratagem.strategies.parameters.threads import Trial, choices

CORES = 3


def threads_of_updates(shard: Shard) -> set[int]:
    """As the server's own threads carry orders out: each is a thread of its own to torch."""
    seen: set[int] = set()

    def obey() -> None:
        for order in (["apply", 1.0, 1.0], ["norm", 1.0]):
            for _ in range(100):
                shard.obey(order)
                if order[0] == "apply":
                    seen.add(torch.get_num_threads())
        if torch.get_num_threads() != 1:
            seen.add(-1)  # a sum must not depend on what was chosen

    thread = threading.Thread(target=obey)
    thread.start()
    thread.join(10)
    return seen


@pytest.mark.parametrize(
    ("updates", "workers", "optimizer", "wanted"),
    [
        (sg.Asynchronous(), 1, torch.optim.SGD, {1, CORES}),
        (sg.Asynchronous(), 2, torch.optim.SGD, {1}),
        (sg.Synchronous(), 2, torch.optim.SGD, {1, CORES}),
        (sg.Synchronous(requeue=False), 2, torch.optim.SGD, {1, CORES}),
        (sg.Synchronous(spares=1), 3, torch.optim.SGD, {1}),
        (sg.Synchronous(), 2, torch.optim.Adafactor, {1}),
    ],
)
def test_several_threads_only_while_everybody_waits(
    updates: Updates, workers: int, optimizer: type[torch.optim.Optimizer], wanted: set[int]
) -> None:
    before = torch.get_num_threads()
    weight = nn.Parameter(torch.zeros(4, 2))
    shapes = ((4, 2),)
    recipe = describe(optimizer([weight]), [weight])  # type: ignore[call-arg]
    plan = Plan(shapes, "float32", partition(shapes, 4, 1, None), recipe, updates, workers, 1)
    try:
        for cores, threads in ((CORES, wanted), (0, {1})):
            shard = Shard(0, torch.device("cpu"), cores)
            shard.open(plan, 0)
            assert threads_of_updates(shard) == threads
        left_alone = Shard(0, torch.device("cpu"), None)
        left_alone.open(plan, 0)
        left_alone.obey(["apply", 1.0, 1.0])
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("times", "best"),
    [({1: 2.0, 4: 1.0}, 4), ({1: 1.0, 4: 2.0}, 1), ({1: 1.0, 4: 0.97}, 1), ({1: 1.0, 4: 0.9}, 4)],
)
def test_the_faster_number_is_kept(times: dict[int, float], best: int) -> None:
    """Hiccups, and the first updates after a change, do not count."""
    now = 0.0
    trial = Trial(sorted(times), clock=lambda: now)
    tried: list[int] = []
    for update in range(200):
        changed = bool(tried) and tried[-1] != trial.threads
        tried.append(trial.threads)
        now += times[trial.threads] + (100.0 if changed or update % 10 == 7 else 0.0)
        trial.made()
    assert set(tried[:32]) == set(times) and set(tried[40:]) == {best}


def test_choices_are_few() -> None:
    assert [choices(n) for n in (0, 1, 2, 3, 16)] == [[1], [1], [1, 2], [1, 3], [1, 4]]
