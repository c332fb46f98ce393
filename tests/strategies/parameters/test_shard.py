"""A server's processors: all of them for an update that everybody waits for, else one."""

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

CORES = 3


def threads_of_an_order(shard: Shard) -> int:
    """As the server's own threads carry orders out: each is a thread of its own to torch."""
    seen: list[int] = []

    def obey() -> None:
        shard.obey(["flush"])
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=obey)
    thread.start()
    thread.join(10)
    return seen[0]


@pytest.mark.parametrize(
    ("updates", "workers", "wanted"),
    [
        (sg.Asynchronous(), 1, CORES),
        (sg.Asynchronous(), 2, 1),
        (sg.Synchronous(), 2, CORES),
        (sg.Synchronous(requeue=False), 2, CORES),
        (sg.Synchronous(spares=1), 3, 1),
    ],
)
def test_all_processors_while_everybody_waits(
    updates: Updates, workers: int, wanted: int
) -> None:
    before = torch.get_num_threads()
    weight = nn.Parameter(torch.zeros(4, 2))
    shapes = ((4, 2),)
    recipe = describe(torch.optim.SGD([weight]), [weight])
    plan = Plan(shapes, "float32", partition(shapes, 4, 1, None), recipe, updates, workers, 1)
    try:
        for cores, threads in ((CORES, wanted), (0, 1), (None, before)):
            shard = Shard(0, torch.device("cpu"), cores)
            shard.open(plan, 0)
            assert threads_of_an_order(shard) == threads
    finally:
        torch.set_num_threads(before)
