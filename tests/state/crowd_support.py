"""Replicas of one machine, run as threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective
from tests.clock import PATIENCE


def give_up(rank: int, seconds: float) -> None:
    if seconds > PATIENCE:
        raise TimeoutError(f"replica {rank} does not come")


def together(size: int, work: Callable[[SharedMemoryCollective], Any]) -> list[Any]:
    """Run replicas, one thread each, and return their results."""
    control = Segment(SharedMemoryCollective.control_size(size))
    members = [SharedMemoryCollective(rank, size, control, give_up) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return [found.result(timeout=PATIENCE) for found in [pool.submit(work, m) for m in members]]
