"""Cutting variables into pieces for servers, and joining what servers hold.

A variable is cut along axis 0, into shares that differ by one row at most; a scalar is never cut.
The largest server is the bottleneck of every push and pull, so pieces are placed to keep it small:

    variable 0  [ rows 0..2 | 3..5 | 6..8 | 9..10 | 11..12 ]      13 rows, 5 shards
    variable 1  [ . ]
    server 0 <- (0, 0..2) (0, 9..10) (1)     server 1 <- (0, 3..5) ...

    partition([(13, 4), ()], itemsize=4, servers=2, partitioner=FixedShards(5))

The optimizer's state of pieces becomes the state of variables, and can be cut for other pieces:

    server 0  (0, rows 0..3)  {"step": 7, "exp_avg": 3 rows}
    server 1  (0, rows 3..5)  {"step": 7, "exp_avg": 2 rows}     assemble ->
              variable 0      {"step": 7, "exp_avg": 5 rows}     cut -> any other pieces

`state_dict` turns that into what torch's optimizer saves, and `states_of` reads such a dictionary:
a checkpoint is independent of servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.state.optimizer_recipe import settings_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of axis 0 of a variable, and the server that holds them."""

    variable: int
    start: int
    stop: int
    server: int

    def shape(self, whole: Sequence[int]) -> Shape:
        """Return the piece's shape, in a variable of shape `whole`."""
        return (self.stop - self.start, *whole[1:]) if whole else ()

    def size(self, whole: Sequence[int]) -> int:
        """Return the piece's number of elements, in a variable of shape `whole`."""
        return math.prod(self.shape(whole))

    def is_whole(self, whole: Sequence[int]) -> bool:
        return not whole or self.stop - self.start == whole[0]


@dataclass(frozen=True)
class FixedShards:
    """Every variable in `n` shards, or as many as it has rows."""

    n: int

    def __post_init__(self) -> None:
        _positive("FixedShards(n)", self.n)

    def shards(self, shape: Sequence[int], itemsize: int) -> int:
        return max(1, min(_rows(shape), self.n))


@dataclass(frozen=True)
class MinSize:
    """As many shards as possible, none below about `min_bytes`, at most `max_shards`."""

    min_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _positive("MinSize(min_bytes)", self.min_bytes)
        _positive("MinSize(max_shards)", self.max_shards)

    def shards(self, shape: Sequence[int], itemsize: int) -> int:
        size = math.prod(shape) * itemsize
        return max(1, min(_rows(shape), self.max_shards, -(-size // self.min_bytes)))


@dataclass(frozen=True)
class MaxSize:
    """As few shards as possible, none larger than `max_bytes` (a row is never cut)."""

    max_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _positive("MaxSize(max_bytes)", self.max_bytes)
        if self.max_shards is not None:
            _positive("MaxSize(max_shards)", self.max_shards)

    def shards(self, shape: Sequence[int], itemsize: int) -> int:
        rows, row = _rows(shape), math.prod(shape[1:]) * itemsize
        shards = -(-rows // max(1, self.max_bytes // row)) if row else 1
        return max(1, min(rows, shards, self.max_shards or shards))


Partitioner = FixedShards | MinSize | MaxSize


def partition(
    shapes: Sequence[Sequence[int]],
    itemsize: int,
    servers: int,
    partitioner: Partitioner | None = None,
    *,
    whole: bool = False,
) -> tuple[Piece, ...]:
    """Cut every variable and place the pieces; the same arguments give the same answer anywhere.

    Pieces come in the order of their variables and rows. `whole` never cuts, for optimizers that
    look at whole variables (see `optimizer_recipe.elementwise`).
    """
    _positive("servers", servers)
    partitioner = partitioner or MinSize(max_shards=servers)
    cuts = [
        (variable, start, stop)
        for variable, shape in enumerate(shapes)
        for start, stop in _shares(
            _rows(shape), 1 if whole or not shape else partitioner.shards(shape, itemsize)
        )
    ]
    sizes = [(stop - start) * math.prod(shapes[v][1:]) for v, start, stop in cuts]
    return tuple(
        Piece(*cut, server) for cut, server in zip(cuts, place(sizes, servers), strict=True)
    )


def place(sizes: Sequence[int], servers: int) -> list[int]:
    """Return a server for every size: the largest first, each onto the emptiest server.

    The fullest server has at most 4/3 of the least that is possible.
    """
    homes, loads = [0] * len(sizes), [0] * servers
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        homes[i] = min(range(servers), key=lambda s: (loads[s], s))
        loads[homes[i]] += sizes[i]
    return homes


def _shares(rows: int, shards: int) -> list[tuple[int, int]]:
    small, more = divmod(rows, shards)
    edges = [i * small + min(i, more) for i in range(shards + 1)]
    return list(pairwise(edges))


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _positive(what: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{what} must be a whole number from 1 on, not {value!r}.")


State = dict[str, Any]


def assemble(
    pieces: Sequence[Piece], states: Sequence[Mapping[str, Any]], shapes: Sequence[tuple[int, ...]]
) -> dict[int, State]:
    """Join the state of every piece of every server, in any order, to state by variable.

    Variables without state (never used) are left out. Pieces without state become zeros, the
    initial state of every optimizer that can be cut by rows.
    """
    by_variable: dict[int, list[tuple[Piece, Mapping[str, Any]]]] = {}
    for piece, state in zip(pieces, states, strict=True):
        by_variable.setdefault(piece.variable, []).append((piece, state))
    whole = {
        variable: _join(sorted(parts, key=lambda part: part[0].start), shapes[variable])
        for variable, parts in sorted(by_variable.items())
    }
    return {variable: state for variable, state in whole.items() if state}


def _join(parts: Sequence[tuple[Piece, Mapping[str, Any]]], shape: tuple[int, ...]) -> State:
    edges = [0, *(piece.stop for piece, _ in parts)]
    if [piece.start for piece, _ in parts] != edges[:-1] or edges[-1] != (shape or (1,))[0]:
        raise UsageError(
            f"the pieces of variable {parts[0][0].variable} do not cover its {shape} once: "
            "every server's are needed."
        )
    if len(parts) == 1:
        return _copy(parts[0][1])
    keys = dict.fromkeys(key for _, state in parts for key in state)
    return {key: _join_one(key, parts, shape) for key in keys}


def _join_one(
    key: str, parts: Sequence[tuple[Piece, Mapping[str, Any]]], shape: tuple[int, ...]
) -> Any:
    found = [state[key] for _, state in parts if key in state]
    tensors = [value for value in found if isinstance(value, Tensor) and value.dim()]
    if not tensors:  # a counter: if pieces differ, the furthest
        furthest = max((state for _, state in parts if key in state), key=_steps)
        return _copy({key: furthest[key]})[key]
    joined = torch.zeros(shape, dtype=tensors[0].dtype)
    for piece, state in parts:
        if state.get(key) is not None:
            joined[piece.start : piece.stop] = state[key]
    return joined


def _steps(state: Mapping[str, Any]) -> float:
    return float(state.get("step") or 0)


def cut(
    whole: Mapping[int, Mapping[str, Any]],
    pieces: Sequence[Piece],
    shapes: Sequence[tuple[int, ...]],
) -> list[State]:
    """Return the state of each piece, in order, as `Store.restore` takes it."""
    return [
        {
            key: _cut_one(key, value, piece, shapes[piece.variable])
            for key, value in whole.get(piece.variable, {}).items()
        }
        for piece in pieces
    ]


def _cut_one(key: str, value: Any, piece: Piece, shape: tuple[int, ...]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if piece.is_whole(shape) or not value.dim():
        return value.detach().clone()
    if value.shape != shape:
        raise UsageError(
            f"the optimizer's {key!r} of variable {piece.variable} has the shape "
            f"{tuple(value.shape)}, not the variable's {shape}: it cannot be cut; place whole "
            "variables."
        )
    return value.detach()[piece.start : piece.stop].clone()


def assemble_values(
    pieces: Sequence[Piece], values: Mapping[int, Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Join every server's flat values to whole variables; `pieces` are all servers', in order."""
    first = next(iter(values.values()))
    whole = [torch.empty(shape, dtype=first.dtype) for shape in shapes]
    at = dict.fromkeys(values, 0)
    for piece in pieces:
        shape = shapes[piece.variable]
        end = at[piece.server] + piece.size(shape)
        part = values[piece.server][at[piece.server] : end].view(piece.shape(shape))
        _rows_of(whole[piece.variable], piece).copy_(part)
        at[piece.server] = end
    return whole


@torch.no_grad()
def cut_values(whole: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    """Return the flat values of one server's pieces."""
    parts = [_rows_of(whole[piece.variable], piece).reshape(-1) for piece in pieces]
    return torch.cat(parts) if parts else torch.empty(0)


def _rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor[piece.start : piece.stop] if tensor.dim() else tensor


# --- torch's form -----------------------------------------------------------------------------


def state_dict(
    whole: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state as torch's `optimizer.state_dict()` with the groups of a recipe.

    Variable None is a parameter of the optimizer that is not trained.
    """
    numbers: dict[int, int] = {}
    listed, first = [], 0  # torch counts through the groups
    for group in groups:
        variables = group["variables"]
        numbers |= {v: first + i for i, v in enumerate(variables) if v is not None}
        params = list(range(first, first + len(variables)))
        listed.append({**settings_of(group), "params": params})
        first += len(variables)
    state = {numbers[v]: _copy(s) for v, s in whole.items() if v in numbers}
    return {"state": dict(sorted(state.items())), "param_groups": listed}


def states_of(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, State], list[dict[str, Any]]]:
    """Read state by variable, and each group's settings, from torch's `state_dict()`."""
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != [len(group["variables"]) for group in groups]:
        raise UsageError(
            f"the saved optimizer has groups of {sizes} parameters, this one of "
            f"{[len(group['variables']) for group in groups]}: they do not fit."
        )
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    variables = [v for group in groups for v in group["variables"]]
    by_id = dict(zip(ids, variables, strict=True))
    whole = {by_id[i]: dict(state) for i, state in saved["state"].items() if by_id[i] is not None}
    return whole, [settings_of(group) for group in saved["param_groups"]]


def _copy(state: Mapping[str, Any]) -> State:
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}
