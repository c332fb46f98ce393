"""The state of an optimizer in shared memory, of which each process writes its own parts.

The user's optimizer is made once more over the parts of this process (`twin`). State of the
twin moves into shared memory, in tensors as large as the parameters:

    exp_avg      [ process 0 | process 1 | process 2 ]
    exp_avg_sq   [ process 0 | process 1 | process 2 ]
    step         a number per parameter, from the process that has its first part
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.state.optimizer_recipe import ELEMENTWISE, group_settings
from stratagem.wire.shared_memory import SharedMemoryCollective

#: settings that add to the state and may be changed during training
MORE_STATE = {"momentum": 0.9, "amsgrad": True, "centered": True}


class StatePart(Protocol):
    """A part of one parameter, which this process updates."""

    @property
    def param(self) -> Tensor: ...

    @property
    def leaf(self) -> Tensor:
        """What the optimizer of this process steps; it shares the parameter's memory."""

    @property
    def first(self) -> bool:
        """Whether this process writes the parameter's numbers, Adam's step for example."""

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of another tensor of the parameter's shape: a view."""


class SharedState:
    """The state of one optimizer over some parameters. Made collectively."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        collective: SharedMemoryCollective,
    ) -> None:
        self._params = list(params)
        self._places = {param: i for i, param in enumerate(self._params)}
        elements, self._numbers, number_type = kinds_of_state(optimizer)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for param in self._params:
            by_type.setdefault(param.dtype, []).append(param)
        #: all elements by type and name, numbers by name, and which parameters have a state by name
        self._elements = [
            (members, _rows(elements, sum(p.numel() for p in members), dtype, collective))
            for dtype, members in by_type.items()
        ]
        self._number_rows = _rows(self._numbers, len(self._params), number_type, collective)
        self._known = _rows([*elements, *self._numbers], len(self._params), torch.bool, collective)
        #: copies of all of these, as they were at `keep`
        self._kept: list[dict[str, Tensor]] | None = None
        self._lay_out()

    def _tables(self) -> list[dict[str, Tensor]]:
        return [*(rows for _, rows in self._elements), self._number_rows, self._known]

    def _lay_out(self) -> None:
        """By parameter and name, views of the state of whole parameters."""
        self._whole: list[dict[str, Tensor]] = [{} for _ in self._params]
        for members, rows in self._elements:
            sizes = [param.numel() for param in members]
            for name, row in rows.items():
                for param, flat in zip(members, torch.split(row, sizes), strict=True):
                    self._whole[self._places[param]][name] = flat.view(param.shape)
        for name, row in self._number_rows.items():
            for state, number in zip(self._whole, row, strict=True):
                state[name] = number

    @property
    def known(self) -> int:
        """How many tensors of state have come into being, on any process."""
        return sum(int(row.sum()) for row in self._known.values())

    def keep(self) -> None:
        """Copy everything, for `put_back`."""
        tables = self._tables()
        if self._kept is None:
            self._kept = [{name: row.clone() for name, row in rows.items()} for rows in tables]
            return
        for copies, rows in zip(self._kept, tables, strict=True):
            for name, row in rows.items():
                copies[name].copy_(row)

    def put_back(self) -> None:
        """From now on this process sees what was kept, in memory of its own."""
        assert self._kept is not None
        *elements, self._number_rows, self._known = self._kept
        self._elements = [(m, rows) for (m, _), rows in zip(self._elements, elements, strict=True)]
        self._lay_out()

    def twin(
        self,
        optimizer: Optimizer,
        parts: Sequence[StatePart],
        settings: Callable[[Mapping[str, Any]], dict[str, Any]] = group_settings,
    ) -> Optimizer:
        """Make the same optimizer over the parts of this process, with copies of its state."""
        leaves = {part.param: part.leaf for part in parts}
        groups = [
            {**settings(group), "params": [leaves[p] for p in group["params"] if p in leaves]}
            for group in optimizer.param_groups
        ]
        twin: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
        for part in parts:
            for name, value in optimizer.state.get(part.param, {}).items():
                if isinstance(value, Tensor):
                    value = value if name in self._numbers else part.of(value.contiguous())
                    value = value.clone()
                twin.state[part.leaf][name] = value
        return twin

    def take_in(self, twin: Optimizer, parts: Iterable[StatePart]) -> None:
        """Have state of the twin that has come into being live here from now on."""
        for part in parts:
            state = twin.state.get(part.leaf)
            if not state:
                continue
            index = self._places[part.param]
            for name, value in state.items():
                home = self._whole[index].get(name)
                if home is None or not isinstance(value, Tensor):
                    continue
                if name not in self._numbers:
                    home = part.of(home)
                elif not part.first:
                    continue  # another process writes it
                # tensors without elements have no address to tell them by
                if home.data_ptr() != value.data_ptr() or not home.numel():
                    state[name] = home.copy_(value)
                    self._known[name][index] = True

    def give(self, optimizer: Optimizer, *, copy: bool) -> None:
        """Give all state to an optimizer of whole parameters; without `copy` it stays in here."""
        known = {name: row.tolist() for name, row in self._known.items()}
        for index, (param, whole) in enumerate(zip(self._params, self._whole, strict=True)):
            for name, value in whole.items():
                if known[name][index]:
                    optimizer.state[param][name] = value.clone() if copy else value


def _rows(
    names: Sequence[str], count: int, dtype: torch.dtype, collective: SharedMemoryCollective
) -> dict[str, Tensor]:
    if not names:
        return {}
    made = collective.table(max(count, 1), dtype, rows=len(names))
    return {name: row[:count] for name, row in zip(names, made.rows, strict=True)}


def warm_up(optimizer: Optimizer) -> None:
    """Make the first update of a process as fast as later ones."""
    if type(optimizer) in ELEMENTWISE:
        kinds_of_state(optimizer, more=False)


def kinds_of_state(
    optimizer: Optimizer, *, more: bool = True
) -> tuple[list[str], list[str], torch.dtype]:
    """Return the names of a state's tensors and of its numbers, and the numbers' type; with
    `more`, also the names under other settings."""
    elements, numbers = set(), {}
    for group in optimizer.param_groups:
        settings = group_settings(group)
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
