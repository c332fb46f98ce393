"""Parameters of which every process has a part along one axis, and the update of these parts.

Parameters lie once in shared memory. A part is a view of one, with a gradient of its own, and the
user's optimizer is made once more over the parts of this process:

    weight, by rows   [ process 0 ]     by columns  [ process 0 | process 1 ]
                      [ process 1 ]

State of the optimizer lies in shared memory, too, in tensors as large as the parameters of which
each process writes its part. So the first process sees all of it at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.state.optimizer_recipe import group_settings
from stratagem.state.shared_state import MORE_STATE, kinds_of_state
from stratagem.wire.shared_memory import SharedMemoryCollective


@dataclass(frozen=True)
class Division:
    """How a tensor is divided: seen as of this shape, along this axis, at these bounds."""

    shape: tuple[int, ...]
    dim: int
    bounds: tuple[int, ...]

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """What process `rank` has of a tensor: a view."""
        lo, hi = self.bounds[rank], self.bounds[rank + 1]
        return tensor.view(self.shape).narrow(self.dim, lo, hi - lo)


@dataclass
class OwnPart:
    """What this process updates of parameter `param`; all of it without a division."""

    param: nn.Parameter
    division: Division | None
    #: gradients are accumulated here; it shares the parameter's memory
    leaf: nn.Parameter
    #: whether this process tells the numbers of the state, as Adam's step
    first: bool


class DividedUpdate:
    """The optimizer of one process' parts. Made collectively."""

    def __init__(
        self,
        optimizer: Optimizer,
        own: Sequence[OwnPart],
        collective: SharedMemoryCollective,
    ) -> None:
        self._optimizer, self._own, self._collective = optimizer, own, collective
        self._leads, self._rank = collective.rank == 0, collective.rank
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._places = {p: i for i, p in enumerate(self._params)}
        elements, numbers, kind = kinds_of_state(optimizer)
        #: by parameter and name, all of the state
        self._whole = [dict[str, Tensor]() for _ in self._params]
        for dtype in dict.fromkeys(p.dtype for p in self._params):
            self._open(elements, [p for p in self._params if p.dtype is dtype], dtype)
        for name in numbers:
            row = collective.table(len(self._params), kind, rows=1).rows[0]
            for i, state in enumerate(self._whole):
                state[name] = row[i]
        #: which parameters have state
        self._there = collective.table(max(len(self._params), 1), torch.bool, rows=1).rows[0]
        #: how many parameters have a state that the user's optimizer has, too
        self._shown = 0
        self._twin = self._make_twin()
        self._share_state()
        if not self._leads:
            optimizer.state.clear()
        collective.barrier()
        self._show()

    def _open(self, names: Sequence[str], params: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Room for the state of all parameters of a type."""
        count = sum(p.numel() for p in params)
        for name in names:
            row = self._collective.table(max(count, 1), dtype, rows=1).rows[0]
            at = 0
            for param in params:
                state = self._whole[self._places[param]]
                state[name] = row[at : at + param.numel()].view(param.shape)
                at += param.numel()

    def _make_twin(self) -> Optimizer:
        """The user's optimizer over the parts of this process, with the state it already had."""
        mine: dict[Tensor, list[nn.Parameter]] = {}
        for part in self._own:
            mine.setdefault(part.param, []).append(part.leaf)
        groups = [
            {
                **_settings(group),
                "params": [leaf for p in group["params"] for leaf in mine.get(p, [])],
            }
            for group in self._optimizer.param_groups
        ]
        twin: Optimizer = type(self._optimizer)(groups)  # type: ignore[call-arg]
        for part in self._own:
            for name, value in self._optimizer.state.get(part.param, {}).items():
                if isinstance(value, Tensor) and value.shape == part.param.shape:
                    value = _part(part, value.contiguous(), self._rank)
                twin.state[part.leaf][name] = value.clone() if isinstance(value, Tensor) else value
        return twin

    def step(self) -> None:
        """Update the parts, and wait until everybody has."""
        self._twin.step()
        self._share_state()
        self._collective.meet("update")
        self._show()

    def _share_state(self) -> None:
        """State that has come into being moves to where everybody sees it."""
        for part in self._own:
            state = self._twin.state.get(part.leaf, {})
            place = self._places.get(part.param)
            if not state or place is None:
                continue
            for name, value in state.items():
                home = self._whole[place].get(name)
                if not isinstance(value, Tensor) or home is None:
                    continue
                if home.dim() or not part.param.dim():
                    home = _part(part, home, self._rank)
                elif not part.first:
                    continue  # a number that another process tells
                if home.data_ptr() != value.data_ptr():
                    state[name] = home.copy_(value)
            self._there[place] = True

    def _show(self) -> None:
        """On the first process: let the user's optimizer have the whole state."""
        there = int(self._there.sum())
        if not self._leads or there == self._shown:
            return
        self._shown = there
        elements, numbers, _ = kinds_of_state(self._optimizer, more=False)
        for i, param in enumerate(self._params):
            if self._there[i]:
                whole = self._whole[i]
                self._optimizer.state[param].update((n, whole[n]) for n in (*elements, *numbers))

    def follow_settings(self) -> None:
        """Take over a changed learning rate, or any other setting, from the user's optimizer."""
        groups = zip(self._optimizer.param_groups, self._twin.param_groups, strict=True)
        for group, own in groups:
            settings = _settings(group)
            if any(settings[name] != own[name] for name in MORE_STATE if name in settings):
                self._shown = -1
            own.update(settings)


def _part(part: OwnPart, whole: Tensor, rank: int) -> Tensor:
    return whole if part.division is None else part.division.part(whole, rank)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group; fused kernels take memory to be without gaps, which a part may have."""
    found = {k: v for k, v in group_settings(group).items() if k != "param_names"}
    return found | ({"fused": None} if "fused" in found else {})
