"""How large the model is, and what of it travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("sparse", "dense")
WAYS = ("shared memory", "sockets")


@dataclass(frozen=True)
class Size:
    """How large everything is.

    rows, width   of the embedding table
    words         of an example; how often the r-th word comes falls as r ** -zipf
    batch         examples of a step
    tables        other numbers of rows, for one worker and one server
    """

    rows: int = 100_000
    width: int = 32
    words: int = 20
    zipf: float = 1.05
    batch: int = 64
    steps: int = 30
    epochs: int = 2
    rounds: int = 3
    rate: float = 0.5
    tables: tuple[int, ...] = (1_000, 10_000, 300_000)
    workers: tuple[int, ...] = (1, 2)
    servers: tuple[int, ...] = (1, 2)
    ways: tuple[str, ...] = WAYS
    simulated_workers: tuple[int, ...] = tuple(2**i for i in range(10))
    simulated_servers: tuple[int, ...] = (1, 4, 16)


SMALL = Size(
    rows=5_000,
    width=8,
    words=10,
    batch=32,
    steps=10,
    epochs=1,
    rounds=1,
    tables=(500,),
    servers=(1,),
    ways=("sockets",),
    simulated_workers=(1, 8, 64),
    simulated_servers=(1,),
)


# --- what travels ---------------------------------------------------------------------------


def chances(size: Size) -> np.ndarray[Any, Any]:
    weights = np.arange(1, size.rows + 1) ** -size.zipf
    return weights / weights.sum()


def rows_touched(size: Size, examples: int) -> float:
    """Of so many examples: the sum over all words of 1 - (1 - p) ** draws."""
    return float(-np.expm1(examples * size.words * np.log1p(-chances(size))).sum())


def row_bytes(size: Size, rows: float) -> float:
    """Rows with their numbers, which take 8 bytes each; never more than the table."""
    return min(rows * (8 + 4 * size.width), table_bytes(size))


def table_bytes(size: Size) -> float:
    return 4.0 * size.rows * size.width


def traffic(size: Size, kind: str, workers: int, examples: int) -> tuple[float, float]:
    """Bytes that a worker pushes and pulls for a gradient of so many examples.

    Servers send the rows that changed since the worker last asked: those of all workers' batches.
    `needed` is what they would send if they knew which rows the worker's next batch has.
    """
    rest = 4.0 * ((size.width + 1) * 32 + 33 * 2)  # the dense layers
    if kind == "dense":
        return table_bytes(size) + rest, table_bytes(size) + rest
    mine = row_bytes(size, rows_touched(size, examples)) + rest
    if kind == "needed":
        return mine, mine
    return mine, row_bytes(size, rows_touched(size, workers * examples)) + rest
