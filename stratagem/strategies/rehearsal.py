"""A training tried out, step by step, in place of running it.

Whoever wants to see what a script trains, and not to train it, opens `instead_of_fit`; the next
`fit` hands over a Rehearsal and goes no further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.strategies.strategy import Strategy


@dataclass(frozen=True)
class Rehearsal:
    """One batch of a training, and what a step does with it."""

    module: nn.Module
    #: one global batch: tensors, or tuples, lists and dicts of them
    batch: Any
    #: of such a batch, ready for `backward`
    loss: Callable[[Any], Tensor]
    #: what follows backward: the optimizer's step
    update: Callable[[], None]
    #: torch's, where there is one: its state is put back afterwards
    optimizer: Optimizer | None = None
    #: over how many replicas the script's strategy splits the batch
    replicas: int = 1
    device: str = "cpu:0"
    #: train a copy on so many such batches with another strategy; examples a second
    train: Callable[[Strategy, Any, int], float] | None = None
    #: what a step changes besides the module and that optimizer
    beside: Sequence[Tensor] = ()


class Handed(BaseException):
    """Ends a script whose `fit` has been handed over; no `except Exception` stops it."""


_taker: list[Callable[[Rehearsal], None]] = []


def wanted() -> bool:
    """Whether `fit` is to hand over a rehearsal instead of training."""
    return bool(_taker)


def hand_over(rehearsal: Rehearsal) -> NoReturn:
    """Give the rehearsal to whoever waits for it, and end the script."""
    _taker[-1](rehearsal)
    raise Handed


@contextmanager
def instead_of_fit(take: Callable[[Rehearsal], None]) -> Iterator[None]:
    """While open, `fit` hands over a rehearsal, and raises `Handed`."""
    _taker.append(take)
    try:
        yield
    finally:
        _taker.remove(take)
