"""Optimizers: by name, class, function or instance."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.errors import UsageError

_NAMES: dict[str, type[Optimizer]] = {
    cls.__name__.lower(): cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
}
_FUSED_ON_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def make_optimizer(
    choice: str | type[Optimizer] | Optimizer | Callable[..., Optimizer], module: nn.Module
) -> Optimizer:
    """The optimizer of this module's parameters."""
    if isinstance(choice, Optimizer):
        _check_parameters(choice, module)
        return choice
    params = [p for p in module.parameters() if p.requires_grad]
    if isinstance(choice, str):
        made: Any = _by_name(choice, params)
    else:
        make: Any = choice
        made = make(params) if callable(make) else None
    if not isinstance(made, Optimizer):
        raise UsageError(
            f'optimizer={choice!r} gives no torch optimizer; use a name such as "adam", a class '
            "of torch.optim, a function of the parameters, or an instance."
        )
    _check_parameters(made, module)
    return made


def _by_name(name: str, params: list[nn.Parameter]) -> Optimizer:
    cls: Any = _NAMES.get(name.lower())
    if cls is None:
        raise UsageError(f'there is no optimizer "{name}"; the names are {", ".join(_NAMES)}.')
    fused = cls in _FUSED_ON_CPU and all(p.is_floating_point() for p in params)
    made: Optimizer = cls(params, **({"fused": True} if fused else {}))
    return made


def _check_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    own = set(module.parameters())
    if not all(own.issuperset(group["params"]) for group in optimizer.param_groups):
        raise UsageError(
            "the optimizer was made from other parameters than this module's; make it from "
            "module.parameters(), or give compile the class or a function: "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1). A loss with parameters of "
            "its own belongs into the module: module.loss = loss, then compile(loss=module.loss)."
        )
