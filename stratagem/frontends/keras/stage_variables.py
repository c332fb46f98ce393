"""The variables of a Keras model on stages, and the slots of its optimizer: where they lie.

SharedVariables   once, in memory that all processes share
PartedVariables   elsewhere: each process updates its own, and has those that its layers use
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

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
    """Made collectively."""

    def __init__(self, model: Any, collective: SharedMemoryCollective) -> None:
        held = [*_held(model), *slots(model.optimizer)]
        self._tensors = SharedTensors(held, collective, keeps=False)
        self._collective = collective
        self.own, self.leave_home = self._tensors.own, self._tensors.leave_home
        self.bring_home = self._tensors.bring_home

    def break_off(self) -> None:
        """It is where all see it."""

    def updated(self) -> None:
        """After an update: wait until everybody has made it. Collective."""
        self._tensors.take_back()
        self._collective.barrier()

    def close(self) -> None:
        """Have the first process own its memory again."""
        self._tensors.close()


class PartedVariables:
    """Made collectively, with the same values everywhere. Slots stay on every process: those of
    variables that it does not update are old until `bring_home`."""

    def __init__(self, model: Any, collective: Collective) -> None:
        self._tensors = PartedTensors(_held(model), collective)
        self._collective = collective
        self._slots = slots(model.optimizer)
        self._written = TensorTracker(self._slots)

    def own(self, used: dict[Tensor, list[int]]) -> None:
        """Who uses each tensor, its owner first. Collective."""
        self._tensors.own(used)

    def leave_home(self) -> None:
        if self._tensors.leave_home():
            self._written.mark(closely=True)  # fused updates leave no trace in versions

    def updated(self) -> None:
        """After an update. Collective."""
        self._tensors.updated()

    @torch.no_grad()
    def bring_home(self) -> None:
        """Have everything everywhere. Collective."""
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
        """After a failure, alone: what others had is lost."""
        self._tensors.leave()

    def close(self) -> None:
        """Everything has been brought home, or is lost."""


# --- an update of which every process makes a part ------------------------------------------------
#
# Weights and the optimizer's slots lie in memory that all share; who owns a variable writes it.
# What an optimizer keeps once (its count of steps, the learning rate) every process has for itself.


def slots(optimizer: Any) -> list[Tensor]:
    """What an optimizer keeps for each variable."""
    own = [v for v in vars(optimizer).values() if isinstance(v, keras.Variable)]
    once = {id(v) for v in own}
    return [v.value for v in optimizer.variables if id(v) not in once]


def square(gradients: Sequence[Tensor | None]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients if g is not None)


@torch.no_grad()
def update(
    optimizer: Any, gradients: Sequence[Tensor | None], variables: Sequence[Any], norm: float
) -> None:
    """Step these variables; `norm` is that of the gradients of all processes."""
    with _clipped(optimizer, norm) as clip:
        if any(gradient is not None for gradient in gradients):
            type(optimizer).apply(optimizer, [clip(g) for g in gradients], list(variables))
        else:
            optimizer.iterations.assign_add(1)


@contextmanager
def _clipped(optimizer: Any, norm: float) -> Iterator[Any]:
    """Clips gradients as Keras does, by the norm over all processes."""
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


def refuse_optimizer(optimizer: Any, who: str) -> None:
    """Refuse one that does more than step each variable by itself; `who` makes a part."""
    kind = type(optimizer).__name__
    if optimizer is None or not type(optimizer).__module__.startswith("keras."):
        raise NotDistributable(
            f"{who} steps the optimizer on its own variables, and {kind} is not one of Keras' own; "
            "use one of keras.optimizers."
        )
    if hasattr(optimizer, "inner_optimizer"):
        raise NotDistributable(
            f"{who} has no scaler of gradients, so {kind} (mixed_float16) cannot be used; "
            "mixed_bfloat16 needs none."
        )
    if optimizer.use_ema:
        raise NotDistributable(
            f"use_ema=True averages all variables at once, and {who} has its own; leave it out, or "
            "use a MirroredStrategy."
        )
    if optimizer.gradient_accumulation_steps:
        raise NotDistributable(
            f"gradient_accumulation_steps keeps gradients of all variables, and {who} has its own; "
            "use a batch_size that many times as large, or a MirroredStrategy."
        )
