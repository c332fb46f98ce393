"""Hands a training to the planner, which tries single steps in place of running it.

The planner opens `instead_of_fit` to see what a script trains; the next `fit` hands over a DryRun
and goes no further. Meanwhile strategies start no process: a custom loop on several replicas runs
once, in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import NotDistributable, UsageError
from stratagem.training.layer_graph import LayerGraph, trace


@dataclass(frozen=True)
class DryRun:
    """One batch of a training, and what a step does with it."""

    module: nn.Module
    #: one global batch: tensors, or tuples, lists and dicts of them
    batch: Any
    #: computes the loss of such a batch
    loss: Callable[[Any], Tensor]
    #: makes the optimizer's step after backward
    update: Callable[[], None]
    #: torch's optimizer, if there is one: its state is restored afterwards
    optimizer: Optimizer | None = None
    #: over how many replicas the script's strategy splits the batch
    replicas: int = 1
    device: str = "cpu:0"
    #: train a copy with another strategy, on so many such batches; examples a second
    train: Callable[[Any, Any, int], float] | None = None
    #: tensors that a step changes besides the module and that optimizer
    beside: Sequence[Tensor] = ()
    #: micro-batches that the batch consists of
    accumulated: int = 1
    #: remarks for the reader of the figures
    notes: Sequence[str] = ()
    #: whether the script has a loop of its own, and calls no `fit`
    own_loop: bool = False
    #: takes the module's input from a batch, and splits it into the module's named arguments
    inputs: Callable[[Any], Any] | None = None
    arguments: Callable[[Sequence[str], Any], list[Any]] | None = None
    #: splits the module into layers, by its input or the names of its arguments
    layers: Callable[[Any, Any], LayerGraph] = trace
    #: opens the precision in which layers are computed one by one
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: why a pipeline and sharded state are not planned
    unpiped: str = "it is not predicted for this training."
    unsharded: str = "it is not predicted for this training."
    #: whether its state is sharded on the CPUs of one machine only
    sharded_here: bool = False
    #: whether mirrored CPU replicas of one machine have one set of parameters, and update parts
    one_set: bool = False


class DryRunHandedOver(BaseException):
    """Ends a script whose `fit` has been handed over; no `except Exception` stops it."""


_taker: list[Callable[[DryRun], None]] = []
#: into how many shares the script's strategy would have cut the batches of a custom loop
_parts = [1]
#: functions of front ends, called when a dry run is wanted; each returns a context to hold open
_front_ends: list[Callable[[], AbstractContextManager[Any]]] = []


def wanted() -> bool:
    """Whether `fit` is to hand over a dry run instead of training."""
    return bool(_taker)


def deal(parts: int) -> None:
    """Remember among how many replicas a loop's batches would be divided."""
    _parts[0] = parts


def dealt() -> int:
    """Return what `deal` was given last."""
    return _parts[0]


def refusal(check: Callable[[], None]) -> str:
    """Return why a strategy refuses a training; an empty string if it does not."""
    try:
        check()
    except (NotDistributable, UsageError) as problem:
        return str(problem)
    return ""


def hand_over(dry_run: DryRun) -> NoReturn:
    """Give the dry run to the planner, and end the script."""
    _taker[-1](dry_run)
    raise DryRunHandedOver


@contextmanager
def instead_of_fit(take: Callable[[DryRun], None]) -> Iterator[None]:
    """While open, `fit` hands over a dry run, and raises `DryRunHandedOver`."""
    with ExitStack() as held:
        for enter in _front_ends:
            held.enter_context(enter())
        _taker.append(take)
        held.callback(_taker.remove, take)
        deal(1)
        yield


def on_dry_run(enter: Callable[[], AbstractContextManager[Any]]) -> None:
    """Have `enter` called, and its context held, while `instead_of_fit` is open."""
    _front_ends.append(enter)
