"""A decision costs the same among a thousand workers as among a few."""

from __future__ import annotations

import time

import pytest

from stratagem.rules.tickets import Push
from stratagem.rules.updates import Asynchronous, Drop, Ramp, ScaleDown, Synchronous, Updates
from tests.clock import unless_late
from tests.rules.drive import ledger


def cost(updates: Updates, workers: int, rounds: int) -> float:
    """Return the processor seconds of a take, a push and a gate check, with all workers in turn."""
    book = ledger(updates, workers, batches=(rounds + 1) * workers)
    start = time.process_time()
    for _ in range(rounds):
        for worker in range(workers):
            ticket = book.take(worker)
            if ticket is not None:
                book.push(Push(worker, ticket.serial, book.version, 1.0))
                book.ripe()
    return (time.process_time() - start) / (rounds * workers)


@pytest.mark.parametrize(
    "updates",
    [
        Synchronous(),
        Synchronous(spares=5),
        Asynchronous([ScaleDown(), Drop()], bound=3),
        Asynchronous(warmup=Ramp(100), buffer=10),
    ],
    ids=str,
)
def test_among_many_as_among_few(updates: Updates) -> None:
    few = min(cost(updates, 10, 100) for _ in range(5))
    many = min(cost(updates, 1000, 1) for _ in range(5))
    unless_late(many < 4 * few, f"{many * 1e6:.1f} us among 1000, {few * 1e6:.1f} among 10")
