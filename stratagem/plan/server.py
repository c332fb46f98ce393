"""What a parameter server's optimizer takes: a real one's update, timed here."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.errors import NotDistributable, UsageError
from stratagem.state.partition import Piece
from stratagem.state.recipe import describe
from stratagem.state.store import Store

#: elements that are tried at most; of larger models a part, and the rest by its size
_MOST = 8 << 20
_ROUNDS = 5


def update_seconds(
    params: Sequence[nn.Parameter], dense: Sequence[int], optimizer: Optimizer
) -> float | None:
    """Of one server that holds these variables of `params`, on one core.

    None if no server takes that optimizer.
    """
    total = sum(params[i].numel() for i in dense)
    if not total:
        return None
    shapes = [_cut(tuple(p.shape), min(1.0, _MOST / total)) for p in params]
    pieces = [Piece(i, 0, shapes[i][0] if shapes[i] else 1, 0) for i in dense]
    try:
        store = Store(pieces, shapes, params[dense[0]].dtype, describe(optimizer, params))
        return _median(store) * total / store.count
    except (NotDistributable, UsageError):
        return None


def refusal(params: Sequence[nn.Parameter], optimizer: Optimizer) -> str:
    """Why no server takes that optimizer; nothing if one does."""
    try:
        describe(optimizer, params)
    except (NotDistributable, UsageError) as problem:
        return str(problem)
    return ""


def _cut(shape: tuple[int, ...], part: float) -> tuple[int, ...]:
    """So much of its rows."""
    return (math.ceil(shape[0] * part), *shape[1:]) if shape else ()


def _median(store: Store) -> float:
    """Seconds of an update."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        grad = torch.full((store.count,), 1e-3, dtype=store.values.dtype)
        return statistics.median([_once(store, grad) for _ in range(_ROUNDS + 1)][1:])
    finally:
        torch.set_num_threads(threads)


def _once(store: Store, grad: torch.Tensor) -> float:
    store.add(grad, 1.0)
    start = time.perf_counter()
    store.apply(0.5)
    return time.perf_counter() - start
