"""The state of an optimizer in shared memory, of which each replica writes its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.state.optimizer_recipe import ELEMENTWISE, group_settings
from stratagem.wire.shared_memory import SharedMemoryCollective

#: settings that add to the state and may be changed on the way
MORE_STATE = {"momentum": 0.9, "amsgrad": True, "centered": True}


class SharedState:
    """The state of one optimizer over some parameters. Made collectively."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        collective: SharedMemoryCollective,
    ) -> None:
        self._params = list(params)
        self._starts = [0]
        for param in params:
            self._starts.append(self._starts[-1] + param.numel())
        elements, numbers, dtype = kinds_of_state(optimizer)
        self._elements = _rows(elements, self._starts[-1], torch.float32, collective)
        self._numbers = _rows(numbers, len(params), dtype, collective)
        #: by name, which parameters have such a state
        self._there = _rows([*elements, *numbers], len(params), torch.bool, collective)
        #: copies of all three, as they were at `keep`
        self._kept: list[dict[str, Tensor]] | None = None

    def keep(self) -> None:
        """Copy everything, for `put_back`."""
        rows = (self._elements, self._numbers, self._there)
        if self._kept is None:
            self._kept = [{name: row.clone() for name, row in each.items()} for each in rows]
            return
        for copies, each in zip(self._kept, rows, strict=True):
            for name, row in each.items():
                copies[name].copy_(row)

    def put_back(self) -> None:
        """From now on this replica sees what was kept, in memory of its own."""
        assert self._kept is not None
        self._elements, self._numbers, self._there = self._kept

    def move_in(self, state: dict[str, Any], index: int, lo: int, hi: int) -> None:
        """Have the state of elements lo..hi of a parameter live here from now on."""
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if name in self._elements:
                start = self._starts[index]
                state[name] = self._elements[name][start + lo : start + hi]
            elif name in self._numbers and lo == 0:
                state[name] = self._numbers[name][index]
            else:
                continue  # a number that another replica has here
            if state[name].data_ptr() != value.data_ptr():
                state[name].copy_(value)
            if lo == 0:
                self._there[name][index] = True

    def part(self, whole: Mapping[str, Any], index: int, lo: int, hi: int) -> dict[str, Any]:
        """Of a parameter's state, that of elements lo..hi, in memory of its own."""
        shape = self._params[index].shape
        state: dict[str, Any] = {}
        for name, value in whole.items():
            if name in self._elements and isinstance(value, Tensor) and value.shape == shape:
                state[name] = value.reshape(-1)[lo:hi].clone()
            elif name in self._numbers and isinstance(value, Tensor):
                state[name] = value.clone()
        return state

    def give(self, optimizer: Optimizer, *, copy: bool) -> None:
        """All of it to an optimizer of whole parameters; without `copy` it goes on living here."""
        there = {name: row.tolist() for name, row in self._there.items()}
        for index, param in enumerate(self._params):
            has = {name for name, known in there.items() if known[index]}
            state = optimizer.state[param] if has else {}
            for name, row in self._elements.items():
                if name in has:
                    lo, hi = self._starts[index], self._starts[index + 1]
                    mine = row[lo:hi].view(param.shape)
                    state[name] = mine.clone() if copy else mine
            for name, row in self._numbers.items():
                if name in has:
                    state[name] = row[index].clone() if copy else row[index]


def _rows(
    names: Sequence[str], count: int, dtype: torch.dtype, collective: SharedMemoryCollective
) -> dict[str, Tensor]:
    if not names:
        return {}
    made = collective.table(count, dtype, rows=len(names))
    return dict(zip(names, made.rows, strict=True))


def warm_up(optimizer: Optimizer) -> None:
    """Have the first update of a process be as fast as later ones."""
    if type(optimizer) in ELEMENTWISE:
        kinds_of_state(optimizer, more=False)


def kinds_of_state(
    optimizer: Optimizer, *, more: bool = True
) -> tuple[list[str], list[str], torch.dtype]:
    """What a step leaves in its state: tensors like the parameter, numbers, and their type; with
    `more`, also what it would leave with other settings."""
    elements, numbers = set(), {}
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group_settings(group).items() if k != "param_names"}
        if more:
            settings |= {key: value for key, value in MORE_STATE.items() if key in settings}
        probe = torch.zeros(2, dtype=torch.float32)
        probe.grad = torch.zeros_like(probe)
        tried: Any = type(optimizer)([{**settings, "params": [probe]}])  # type: ignore[call-arg]
        tried.step()
        for name, value in tried.state[probe].items():
            if isinstance(value, Tensor) and value.shape == probe.shape:
                elements.add(name)
            elif isinstance(value, Tensor):
                numbers[name] = value.dtype
    dtype = next(iter(numbers.values()), torch.float32)
    return sorted(elements), sorted(numbers), dtype
