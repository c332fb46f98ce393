"""The arguments of `compile` as a recipe: loss, metrics, optimizer and training options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem.errors import UsageError
from stratagem.frontends.losses import CountedLoss, Loss
from stratagem.frontends.metrics import MetricSet
from stratagem.frontends.row_trials import CheckSchedule
from stratagem.strategies.strategy import Strategy
from stratagem.training.fingerprint import Look


@dataclass
class Recipe:
    """How a model is trained, except for its optimizer."""

    loss: Loss
    metrics: MetricSet
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    jit_compile: bool = False
    #: whether to check that rows do not depend on each other (row_check.py)
    check: bool = True
    #: loss and metrics by name, for `repr`
    words: str = ""
    #: the batches since `compile` that were checked
    schedule: CheckSchedule = field(default_factory=CheckSchedule, repr=False, compare=False)

    def look(self) -> Look:
        """Return the settings that must be equal on every worker."""
        plain = {
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
            "accumulate": self.accumulate,
            "precision": self.autocast,
            "check": self.check,
        }
        options = {name: str(value) for name, value in plain.items()}
        names = ", ".join(sorted(self.metrics.names))
        return {"loss": _describe_loss(self.loss), "list of metrics": names or "none", **options}


def _describe_loss(loss: Any) -> str:
    kind = f"{type(loss).__name__} {_function_name(loss.function)}"
    if not isinstance(loss, CountedLoss):
        return kind
    weight = loss.class_weight
    told = None if weight is None else [round(float(w), 4) for w in weight.reshape(-1)[:8]]
    return f"{kind} (ignore_index={loss.ignore_index}, weight={told}, {loss.options})"


def _function_name(function: Any) -> str:
    """Return a function's name; for a lambda, also the names that it uses."""
    if isinstance(function, partial):
        return f"partial of {_function_name(function.func)}"
    if isinstance(function, nn.Module) or not hasattr(function, "__qualname__"):
        reduction = getattr(function, "reduction", None)
        return type(function).__name__ + (f" ({reduction})" if reduction else "")
    name = str(function.__qualname__).rpartition(".")[2]
    code = getattr(function, "__code__", None)
    return f"{name} of {', '.join(code.co_names)}" if name == "<lambda>" and code else name


def in_words(loss: Any, metrics: Any) -> str:
    """Return the names of a loss and of metrics, given in any form."""
    several = isinstance(metrics, Iterable) and not isinstance(metrics, str)
    return ", ".join(map(_name, [loss, *(metrics if several else [metrics] if metrics else [])]))


def _name(given: Any) -> str:
    if isinstance(given, str):
        return given
    return str(getattr(given, "__name__", type(given).__name__))


def describe(
    module: nn.Module, optimizer: object, recipe: Recipe | None, strategy: Strategy
) -> str:
    """Return a one-line description of a model, its recipe and its devices."""
    sizes = [p.numel() for p in module.parameters() if not is_lazy(p)]
    how = "not compiled"
    if recipe is not None:
        by = f"{_name(optimizer)}, " if optimizer is not None else ""
        how = f"compiled with {by}{recipe.words}"
    kind = "one device" if type(strategy) is Strategy else type(strategy).__name__
    return (
        f"<sg.Model of {type(module).__name__}, {sum(sizes):,} parameters; {how}; "
        f"{kind} on {', '.join(strategy.devices)}>"
    )


_NAMES: dict[str, type[Optimizer]] = {
    cls.__name__.lower(): cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
}
_FUSED_ON_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def make_optimizer(
    choice: str | type[Optimizer] | Optimizer | Callable[..., Optimizer], module: nn.Module
) -> Optimizer:
    """Make the optimizer of a module's trainable parameters."""
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
