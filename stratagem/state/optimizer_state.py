"""The state of an optimizer by parameter, as one process copies it and another takes it over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def optimizer_state(optimizer: Any) -> list[Any]:
    """Copy the state of an optimizer of torch or Keras, parameter by parameter."""
    if isinstance(optimizer, Optimizer):
        states = [optimizer.state.get(param, {}) for param in params_of(optimizer)]
        return [{name: _copy(value) for name, value in state.items()} for state in states]
    return [_copy(variable.value) for variable in optimizer.variables]


@torch.no_grad()
def take_optimizer_state(optimizer: Any, saved: Sequence[Any]) -> None:
    """Restore what `optimizer_state` returned; parameters without a saved state keep their own."""
    if not isinstance(optimizer, Optimizer):
        for variable, value in zip(optimizer.variables, saved, strict=True):
            variable.value.copy_(value)
        return
    for param, state in zip(params_of(optimizer), saved, strict=True):
        if state:
            take_state(optimizer, param, {name: _copy(value) for name, value in state.items()})


def take_state(optimizer: Optimizer, param: Tensor, state: Mapping[str, Any]) -> None:
    """Replace the state of one parameter by that of another process: tensors as large as the
    parameter go to its device, counters stay on the CPU, where torch's optimizers want them."""
    optimizer.state[param] = {
        name: value.to(param.device) if _goes_with(param, name, value) else value
        for name, value in state.items()
    }


def _goes_with(param: Tensor, name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and name != "step"


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
