"""The optimizer's state of pieces put together, and cut for other pieces.

    server 0  (0, rows 0..3)  {"step": 7, "exp_avg": 3 rows}
    server 1  (0, rows 3..5)  {"step": 7, "exp_avg": 2 rows}     assemble ->
              variable 0      {"step": 7, "exp_avg": 5 rows}     cut -> any other pieces

`state_dict` makes of it what torch's optimizer saves, and `states_of` takes that apart again: a
checkpoint knows nothing of servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.state.partition import Piece
from stratagem.state.recipe import settings_of

State = dict[str, Any]


def assemble(
    pieces: Sequence[Piece], states: Sequence[Mapping[str, Any]], shapes: Sequence[tuple[int, ...]]
) -> dict[int, State]:
    """State by variable from the state of every piece of every server, in any order.

    Variables without state (never used) are left out. Where some pieces of a variable have none,
    their rows are zeros, which is how every optimizer that takes rows begins.
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
    if not tensors:  # a counter or the like, from where it got furthest if they differ
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
    whole: Mapping[int, Mapping[str, Any]], pieces: Sequence[Piece],
    shapes: Sequence[tuple[int, ...]],
) -> list[State]:  # fmt: skip
    """The state of each piece, in order, as `Store.restore` takes it."""
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
    """Whole variables from every server's flat values; `pieces` are those of all, in order."""
    first = next(iter(values.values()))
    whole = [torch.empty(shape, dtype=first.dtype) for shape in shapes]
    at = dict.fromkeys(values, 0)
    for piece in pieces:
        shape = shapes[piece.variable]
        end = at[piece.server] + piece.size(shape)
        part = values[piece.server][at[piece.server] : end].view(piece.shape(shape))
        _rows(whole[piece.variable], piece).copy_(part)
        at[piece.server] = end
    return whole


@torch.no_grad()
def cut_values(whole: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    """The flat values of one server's pieces."""
    parts = [_rows(whole[piece.variable], piece).reshape(-1) for piece in pieces]
    return torch.cat(parts) if parts else torch.empty(0)


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor[piece.start : piece.stop] if tensor.dim() else tensor


# --- torch's form -----------------------------------------------------------------------------


def state_dict(
    whole: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What torch's `optimizer.state_dict()` would be, with these groups.

    They are as a recipe's; variable None is a parameter of the optimizer that is not trained.
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
    """State by variable, and each group's settings, from torch's `optimizer.state_dict()`."""
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
