"""The variables of a Keras model on stages, and the slots of its optimizer: where they lie.

SharedVariables   once, in memory that all processes share
PartedVariables   elsewhere: each process updates its own, and has those that its layers use
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem.frontends.keras.owned_update import slots
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
