"""A server tries several numbers of threads, and keeps the fastest."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.rules.updates import Updates
from stratagem.servers.shard import Shard
from stratagem.servers.thread_tuning import ThreadTrial, choices
from stratagem.servers.training_plan import TrainingPlan
from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import partition
from tests.clock import PATIENCE

CORES = 3


def threads_of_updates(shard: Shard) -> set[int]:
    """Obey orders in new threads, each of which has its own number of torch threads."""
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
    thread.join(PATIENCE)
    return seen


def plan_with(optimizer: Any, updates: Updates, workers: int = 2) -> TrainingPlan:
    weight = nn.Parameter(torch.zeros(4, 2))
    shapes = ((4, 2),)
    recipe = describe(optimizer([weight]), [weight])
    return TrainingPlan(
        shapes, "float32", partition(shapes, 4, 1, None), recipe, updates, workers, 1
    )


@pytest.mark.parametrize(
    ("optimizer", "updates", "wanted"),
    [
        (torch.optim.SGD, sg.Asynchronous(), {1, CORES}),
        (torch.optim.Adam, sg.Synchronous(), {1, CORES}),
        (torch.optim.Adafactor, sg.Synchronous(), {1}),  # its sums would come out otherwise
    ],
)
def test_several_threads_are_tried(optimizer: Any, updates: Updates, wanted: set[int]) -> None:
    before = torch.get_num_threads()
    plan = plan_with(optimizer, updates)
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


def test_a_fit_like_the_last_one_needs_no_other_trial() -> None:
    shard = Shard(0, torch.device("cpu"), CORES)
    made = []
    for plan in (
        plan_with(torch.optim.SGD, sg.Synchronous()),
        plan_with(torch.optim.SGD, sg.Synchronous()),
        plan_with(torch.optim.SGD, sg.Synchronous(), workers=3),
    ):
        shard.open(plan, 0)
        made.append(shard._trial)
    assert made[0] is made[1] is not made[2]


@pytest.mark.parametrize(
    ("times", "best"),
    [({1: 2.0, 4: 1.0}, 4), ({1: 1.0, 4: 2.0}, 1), ({1: 1.0, 4: 0.97}, 1), ({1: 1.0, 4: 0.9}, 4)],
)
def test_the_faster_number_is_kept(times: dict[int, float], best: int) -> None:
    """Hiccups, and the first updates after a change, do not count."""
    now = 0.0
    trial = ThreadTrial(sorted(times), clock=lambda: now)
    tried: list[int] = []
    for update in range(200):
        changed = bool(tried) and tried[-1] != trial.threads
        tried.append(trial.threads)
        now += times[trial.threads] + (100.0 if changed or update % 10 == 7 else 0.0)
        trial.made()
    assert set(tried[:32]) == set(times) and set(tried[40:]) == {best}


def test_choices_are_few() -> None:
    assert [choices(n) for n in (0, 1, 2, 3, 16)] == [[1], [1], [1, 2], [1, 3], [1, 4]]
