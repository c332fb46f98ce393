"""The update of parameters of which every process has a part along one axis.

One set of parameters lies in shared memory. A part is a view of one, with a gradient of its own,
and the user's optimizer is made once more over the parts of this process:

    weight, by rows   [ process 0 ]     by columns  [ process 0 | process 1 ]
                      [ process 1 ]

The optimizer's state lies in shared memory, too (shared_state.py), so the first process sees all of
it at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.state.optimizer_recipe import group_settings
from stratagem.state.optimizer_state import params_of
from stratagem.state.shared_state import SharedState
from stratagem.wire.shared_memory import SharedMemoryCollective


@dataclass(frozen=True)
class Division:
    """How a tensor, viewed in `shape`, is divided along axis `dim` at these bounds."""

    shape: tuple[int, ...]
    dim: int
    bounds: tuple[int, ...]

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the part of process `rank`: a view."""
        lo, hi = self.bounds[rank], self.bounds[rank + 1]
        return tensor.view(self.shape).narrow(self.dim, lo, hi - lo)


@dataclass
class OwnPart:
    """The part of parameter `param` that this process updates; all of it without a division."""

    param: nn.Parameter
    division: Division | None
    #: gradients are accumulated here; it shares the parameter's memory
    leaf: nn.Parameter
    #: whether this process writes the parameter's numbers, Adam's step for example
    first: bool
    rank: int

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of another tensor of the parameter's shape: a view."""
        return whole if self.division is None else self.division.part(whole, self.rank)


class DividedUpdate:
    """The optimizer of one process' parts. Made collectively."""

    def __init__(
        self,
        optimizer: Optimizer,
        own: Sequence[OwnPart],
        collective: SharedMemoryCollective,
    ) -> None:
        self._optimizer, self._own, self._collective = optimizer, own, collective
        self._leads = collective.rank == 0
        self._state = SharedState(optimizer, params_of(optimizer), collective)
        #: how much of the state the user's optimizer has, too
        self._shown = 0
        self._twin = self._state.twin(optimizer, own, _settings)
        self._state.take_in(self._twin, own)
        if not self._leads:
            optimizer.state.clear()
        collective.barrier()
        self._show()

    def step(self) -> None:
        """Update the parts, and wait until all processes have."""
        self._twin.step()
        self._state.take_in(self._twin, self._own)
        self._collective.meet("update")
        self._show()

    def _show(self) -> None:
        """On the first process: let the user's optimizer have the whole state."""
        if self._leads and self._state.known != self._shown:
            self._shown = self._state.known
            self._state.give(self._optimizer, copy=False)

    def follow_settings(self) -> None:
        """Take over a changed learning rate, or any other setting, from the user's optimizer."""
        groups = zip(self._optimizer.param_groups, self._twin.param_groups, strict=True)
        for group, own in groups:
            own.update(_settings(group))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings without fused kernels, which assume contiguous memory."""
    found = group_settings(group)
    return found | ({"fused": None} if "fused" in found else {})
