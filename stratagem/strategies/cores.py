"""A core of its own for each CPU replica, when the replicas of one machine fill it.

Replicas in lock step wait for each other twice a step, and every wake-up is a chance for the
kernel to put two of them on one core while another stands idle; all then wait for those two
(docs/decisions/006). Only the thread that trains is held, and only while it trains.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stratagem.strategies.replica import Replica
from stratagem.wire.shared_memory import SharedMemoryCollective


def available() -> tuple[int, ...]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def own_core(cores: tuple[int, ...], replicas: int, threads: int, index: int) -> int | None:
    """The core of replica `index`; None where the kernel knows better.

    That is when replicas have several threads, when there are too few cores, or so many that
    another job may be at work on the first ones.
    """
    if threads == 1 and 1 < replicas <= len(cores) < 2 * replicas:
        return cores[index]
    return None


@contextmanager
def held(replica: Replica) -> Iterator[None]:
    """Keep this thread on its replica's core until the block ends."""
    core = None
    if isinstance(replica.collective, SharedMemoryCollective) and hasattr(os, "sched_setaffinity"):
        core = own_core(available(), replica.count, torch.get_num_threads(), replica.index)
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
