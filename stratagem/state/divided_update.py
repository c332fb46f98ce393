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
        self._optimizer, self._collective = optimizer, collective
        self._leads = collective.rank == 0
        self._state = SharedState(optimizer, params_of(optimizer), collective)
        #: how much of the state the user's optimizer has, too
        self._shown = 0
        #: fused kernels assume contiguous memory: parts cut by columns have an optimizer without
        whole = [part for part in own if part.leaf.is_contiguous()]
        cut = [part for part in own if not part.leaf.is_contiguous()]
        self._twins = [
            (self._state.twin(optimizer, parts, settings), parts, settings)
            for parts, settings in ((whole, group_settings), (cut, _without_fused))
        ]
        self._take_in()
        if not self._leads:
            optimizer.state.clear()
        collective.barrier()
        self._show()

    def step(self) -> None:
        """Update the parts, and wait until all processes have."""
        for twin, _, _ in self._twins:
            twin.step()
        self._take_in()
        self._collective.meet("update")
        self._show()

    def _take_in(self) -> None:
        for twin, parts, _ in self._twins:
            self._state.take_in(twin, parts)

    def _show(self) -> None:
        """On the first process: let the user's optimizer have the whole state."""
        if self._leads and self._state.known != self._shown:
            self._shown = self._state.known
            self._state.give(self._optimizer, copy=False)

    def follow_settings(self) -> None:
        """Take over a changed learning rate, or any other setting, from the user's optimizer."""
        for twin, _, settings in self._twins:
            for group, own in zip(self._optimizer.param_groups, twin.param_groups, strict=True):
                own.update(settings(group))


def _without_fused(group: Mapping[str, Any]) -> dict[str, Any]:
    found = group_settings(group)
    return found | ({"fused": None} if "fused" in found else {})
