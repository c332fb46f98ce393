"""Where the variables of a Keras model on stages, and its optimizer's slots, are stored.

SharedVariables   once, in memory that all processes share
PartedVariables   between machines: each process has the variables of its layers
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import TensorTracker
from stratagem.state.parted_model import PartedTensors
from stratagem.state.shared_model import SharedTensors
from stratagem.wire.collective import Collective
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.tree import broadcast_tree, gather_tree


def _held(model: Any) -> list[Tensor]:
    return [*(v.value for v in model.weights), *model.buffers()]


class SharedVariables:
    """Variables and slots in memory that all processes share. Collective to make."""

    def __init__(self, model: Any, collective: SharedMemoryCollective) -> None:
        held = [*_held(model), *slots(model.optimizer)]
        self._tensors = SharedTensors(held, collective, keeps=False)
        self._collective = collective
        self.own, self.leave_home = self._tensors.own, self._tensors.leave_home
        self.bring_home = self._tensors.bring_home

    def break_off(self) -> None:
        """Nothing to do: all processes see the memory."""

    def updated(self) -> None:
        """Wait until all processes have made an update. Collective."""
        self._tensors.take_back()
        self._collective.barrier()

    def close(self) -> None:
        """Copy variables out of shared memory on the first process."""
        self._tensors.close()


class PartedVariables:
    """Variables of which each process updates its own. Collective to make, with the same values on
    all. Slots of variables that a process does not update are old until `bring_home`."""

    def __init__(self, model: Any, collective: Collective) -> None:
        self._tensors = PartedTensors(_held(model), collective)
        self._collective = collective
        self._slots = slots(model.optimizer)
        self._written = TensorTracker(self._slots)

    def own(self, used: dict[Tensor, list[int]]) -> None:
        """Set the processes that use each tensor, its owner first. Collective."""
        self._tensors.own(used)

    def leave_home(self) -> None:
        if self._tensors.leave_home():
            self._written.mark(closely=True)  # fused updates leave no trace in versions

    def updated(self) -> None:
        """Send updated variables to the processes that use them. Collective."""
        self._tensors.updated()

    @torch.no_grad()
    def bring_home(self) -> None:
        """Bring all variables and slots to all processes. Collective."""
        if not self._tensors.bring_home():
            return
        mine = self._written.changes()
        for rank, written in enumerate(gather_tree(self._collective, mine)):
            theirs = [self._slots[i] for i in written]
            told = broadcast_tree(self._collective, [t.detach() for t in theirs], rank)
            if rank != self._collective.rank:
                for slot, value in zip(theirs, told, strict=True):
                    slot.copy_(value)

    def break_off(self) -> None:
        """Give up after a failure: the variables of other processes are lost."""
        self._tensors.leave()

    def close(self) -> None:
        """Nothing to do: `bring_home` or `break_off` came before."""


# --- an update of which every process makes a part ------------------------------------------------
#
# The owner of a variable updates it and its slots. Every process has a step count and a learning
# rate of its own.


def slots(optimizer: Any) -> list[Tensor]:
    """Return the optimizer's state by variable."""
    own = [v for v in vars(optimizer).values() if isinstance(v, keras.Variable)]
    once = {id(v) for v in own}
    return [v.value for v in optimizer.variables if id(v) not in once]


def square(gradients: Sequence[Tensor | None]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients if g is not None)


@torch.no_grad()
def update(
    optimizer: Any, gradients: Sequence[Tensor | None], variables: Sequence[Any], norm: float
) -> None:
    """Update these variables; `norm`: of the gradients of all processes."""
    with _clipped(optimizer, norm) as clip:
        if any(gradient is not None for gradient in gradients):
            type(optimizer).apply(optimizer, [clip(g) for g in gradients], list(variables))
        else:
            optimizer.iterations.assign_add(1)


@contextmanager
def _clipped(optimizer: Any, norm: float) -> Iterator[Any]:
    """Return a function that clips as Keras does, by the norm over all processes."""
    limit = optimizer.global_clipnorm
    if not limit:
        yield lambda grad: grad
        return
    scale = limit * min(1.0 / norm if norm else math.inf, 1.0 / limit) + (norm - norm)
    optimizer.global_clipnorm = None
    try:
        yield lambda grad: None if grad is None else grad * scale
    finally:
        optimizer.global_clipnorm = limit


def refuse_optimizer(optimizer: Any, placement: str) -> None:
    """Raise for an optimizer that does more than update each variable by itself."""
    kind = type(optimizer).__name__
    if optimizer is None or not type(optimizer).__module__.startswith("keras."):
        raise NotDistributable(
            sentence(placement, "optimizers that are not Keras' own", optimizer=kind)
        )
    if hasattr(optimizer, "inner_optimizer"):
        raise NotDistributable(sentence(placement, "mixed_float16", optimizer=kind))
    if optimizer.use_ema:
        raise NotDistributable(sentence(placement, "use_ema"))
    if optimizer.gradient_accumulation_steps:
        raise NotDistributable(sentence(placement, "gradient_accumulation_steps"))
