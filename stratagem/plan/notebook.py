"""`sg.plan(model, batch)`: the planner in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shares import count_rows
from stratagem.errors import UsageError
from stratagem.plan.advice import code, sentence
from stratagem.plan.choose import Plan, check_most, choose
from stratagem.plan.cost import Prediction
from stratagem.plan.front_ends import open_front_ends
from stratagem.plan.hardware import Hardware, size
from stratagem.plan.machine import measure_hardware
from stratagem.plan.measure import rehearse
from stratagem.plan.page import fragment, page
from stratagem.plan.profile import Profile
from stratagem.plan.report import dumps, text, to_json, write
from stratagem.state.sliced import can_slice
from stratagem.training.dry_run import DryRun, DryRunHandedOver, instead_of_fit


@dataclass(frozen=True, repr=False)
class NotebookPlan:
    """A plan that displays itself in a notebook; `plan` has the numbers."""

    plan: Plan

    @property
    def recommendation(self) -> Prediction:
        return self.plan.recommendation

    @property
    def sentence(self) -> str:
        return sentence(self.plan)

    @property
    def code(self) -> str:
        return code(self.plan)

    def to_json(self) -> dict[str, Any]:
        return to_json(self.plan)

    def save(self, path: str) -> None:
        """Save the plan as .json or .html."""
        make = {".json": dumps, ".html": page}
        kind = Path(path).suffix
        if kind not in make:
            raise UsageError(f"{path!r}: a plan is saved as .json or .html.")
        data = make[kind](self.plan)
        try:
            write(path, data)
        except OSError as problem:
            raise UsageError(f"{path!r} cannot be written ({problem.strerror}).") from None

    def __repr__(self) -> str:
        return text(self.plan)

    def _repr_html_(self) -> str:
        return fragment(self.plan)


def plan(
    model: Any,
    batch: Any,
    *,
    loss: str | Callable[[Any, Any], Tensor] | None = None,
    optimizer: str | Optimizer | Callable[..., Optimizer] | None = None,
    link: str | float = "10Gbit",
    latency: str | float = "50us",
    hosts: int = 8,
    gpus_per_host: int | None = None,
    most: int | None = None,
    memory: str | float | None = None,
    lossy: bool = False,
) -> NotebookPlan:
    """Measure a model on one batch, and predict every strategy on this hardware.

    Args:
        model: a compiled sg.Model or Keras model; or an nn.Module, with `loss` and `optimizer`.
        loss, optimizer: functions, names or classes, as sg.Model.compile takes them.
        batch: (x, y), as many examples as one replica computes at once.
        link, latency: between hosts, as "10Gbit" and "50us".
        hosts: how many there could be, of `gpus_per_host` devices each (default: as many as here).
        most: the largest number of replicas to look at.
        memory: bytes of each device, as "16GB" (default: what this machine has).
        lossy: also predict gradient compression, and say whether it pays.

    >>> sg.plan(model, (x[:64], y[:64]), link="1Gbit", hosts=4)
    """
    # check the arguments before measuring, which takes long
    if gpus_per_host is not None and (type(gpus_per_host) is not int or gpus_per_host < 1):
        raise UsageError(
            f"gpus_per_host is {gpus_per_host!r}; it must be a whole number, 1 or more."
        )
    asked = Hardware.of(link=link, latency=latency, hosts=hosts)
    check_most(most)
    measured = _measured(model, batch, loss, optimizer, lossy)
    here = measure_hardware(measured.device)
    counts = {"hosts": hosts, "per_host": gpus_per_host or here.per_host}
    if memory is not None:
        here = replace(here, memory=size(memory, "memory") if isinstance(memory, str) else memory)
    hardware = Hardware.of(link=asked.link, latency=asked.latency, base=here, **counts)
    return NotebookPlan(choose(measured, hardware, most=most, lossy=lossy))


def _measured(model: Any, batch: Any, loss: Any, optimizer: Any, lossy: bool) -> Profile:
    model_class = open_front_ends()
    ours = not isinstance(model, nn.Module) and hasattr(model, "fit")
    if ours or _of_keras(model):
        return _of_fit(model, batch, lossy)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"sg.plan takes a compiled sg.Model or Keras model, or an nn.Module, not a "
            f"{type(model).__name__}."
        )
    if loss is None or optimizer is None:
        raise UsageError(
            "to plan for an nn.Module, say how it is trained: sg.plan(module, (x, y), "
            'loss="cross_entropy", optimizer="adam"), as sg.Model.compile takes them.'
        )
    if not isinstance(optimizer, Optimizer) or isinstance(loss, type) or not callable(loss):
        compiled = model_class(model)
        compiled.compile(optimizer, loss)  # only `compile` understands names and classes
        return _of_fit(compiled, batch, lossy)
    _check_parameters(model, optimizer)
    given = _as_tensors(_pair(batch))
    return profile(model, given, loss=loss, optimizer=optimizer, crowded=True, lossy=lossy)


def profile(
    module: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    steps: int | None = None,
    crowded: bool = False,
    lossy: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure steps of `loss(module(x), y)` on batch (x, y); the module is left as it was."""
    device = _device(module)

    def value(given: Any) -> Tensor:
        x, y = given
        return loss(module(*x) if isinstance(x, tuple) else module(x), y)

    trial = DryRun(
        module,
        batch,
        value,
        optimizer.step,
        optimizer,
        device=str(device),
        inputs=lambda given: given[0],
        arguments=lambda names, x: list(x) if isinstance(x, tuple) else [x],
        unpiped="",
        unsharded="",
        one_set=can_slice(optimizer, [p for p in module.parameters() if p.requires_grad]),
    )
    return rehearse(trial, steps=steps, crowded=crowded, lossy=lossy, say=say)


def _device(module: nn.Module) -> torch.device:
    """Return the device of a module; refuse lazy parameters."""
    params = list(module.parameters())
    if any(nn.parameter.is_lazy(each) for each in params):
        raise UsageError(
            f"{type(module).__name__} has lazy layers, whose parameters are not there yet; call "
            "it with a batch once, before its optimizer is made."
        )
    return params[0].device if params else torch.device("cpu")


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    params = list(model.parameters())
    updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if params and not any(id(param) in updated for param in params):
        raise UsageError(
            f"the {type(optimizer).__name__} has none of this {type(model).__name__}'s parameters; "
            "make it from module.parameters()."
        )


def _of_keras(model: Any) -> bool:
    """Whether `fit` is that of Keras: another module's may do anything, and is never called."""
    kinds = (each.__module__.partition(".")[0] for each in type(model).__mro__)
    return hasattr(model, "fit") and "keras" in kinds


def _of_fit(model: Any, batch: Any, lossy: bool = False) -> Profile:
    """Measure the step that the model's own `fit` makes."""
    found: list[DryRun] = []
    x, y = _pair(batch)
    if getattr(model, "compiled", True) is False:
        raise UsageError(
            "compile the model before it is planned for: model.compile(optimizer=..., loss=...)."
        )
    plain = count_rows(x) if isinstance(x, dict | tuple) else len(x)
    size = max(1, next(_lengths(x), plain))
    with instead_of_fit(found.append), suppress(DryRunHandedOver):
        model.fit(x, y, batch_size=size, verbose=0, shuffle=False)
    if found:
        return rehearse(found[0], batch=size, lossy=lossy)  # outside of instead_of_fit
    raise UsageError(
        f"fit of this {type(model).__name__} cannot be watched; compile it in a strategy's scope: "
        "with sg.MirroredStrategy().scope(): model.compile(...)."
    )


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, torch.Tensor | np.ndarray):
        raise UsageError("the batch to plan with is (x, y), not x alone.")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UsageError("the batch to plan with is a pair (x, y) of inputs and targets.")
    lengths = sorted(set(_lengths(tuple(batch))))
    if len(lengths) > 1:
        raise UsageError(
            "everything in the batch to plan with has a row for each example; here are "
            f"{' and '.join(map(str, lengths))} rows."
        )
    return batch[0], batch[1]


def _lengths(tree: Any) -> Iterator[int]:
    """Yield the lengths of all arrays that have rows."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for each in tree:
            yield from _lengths(each)
    elif len(getattr(tree, "shape", ())):
        yield len(tree)


def _as_tensors(tree: Any) -> Any:
    """Convert NumPy arrays to tensors."""
    if isinstance(tree, dict):
        return {key: _as_tensors(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(_as_tensors(each) for each in tree)
    return torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree
