"""A training loop of one's own, seen at its first step: hooks on all that torch runs.

    model(x)            outermost of all modules that are called: what went in, what came out
    loss.backward()     the gradient that comes back to what came out
    optimizer.step()    here the loop ends; a step is the same call with the same gradient

What turns outputs into a loss cannot be called again, so the sum of outputs times their gradients
stands in for it: of about the same size, and with the same backward pass through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.optim import Optimizer
from torch.optim import optimizer as every_optimizer
from torch.utils import _pytree as tree

from stratagem.errors import UsageError
from stratagem.strategies.rehearsal import Rehearsal, dealt, hand_over

_INSTEAD = "use sg.plan(module, (x, y), loss=..., optimizer=...) in its place"


@dataclass
class _Call:
    """One call of an outermost module."""

    module: nn.Module
    given: tuple[Any, Any]
    autocast: torch.dtype | None
    #: of the outputs that came back with one, by their place among all outputs
    grads: dict[int, Tensor] = field(default_factory=dict)

    def came_back(self, place: int, grad: Tensor) -> None:
        self.grads[place] = grad.detach()


@contextmanager
def instead_of_step() -> Iterator[None]:
    """While open, the first step of any torch optimizer hands over a rehearsal."""
    watcher = _Watcher()
    before = every_module.register_module_forward_pre_hook(watcher.enters)
    after = every_module.register_module_forward_hook(
        watcher.leaves, with_kwargs=True, always_call=True
    )
    step = every_optimizer.register_optimizer_step_pre_hook(watcher.steps)
    try:
        yield
    finally:
        for handle in (before, after, step):
            handle.remove()


class _Watcher:
    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []

    def enters(self, module: nn.Module, args: Any) -> None:
        self.depth += 1

    def leaves(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth or not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return
        call = _Call(module, (args, kwargs), _autocast(next(module.parameters()).device.type))
        for i, each in enumerate(tree.tree_leaves(output)):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(call.came_back, i))  # type: ignore[no-untyped-call]
        self.calls.append(call)

    def steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(each) for each in (*args, *kwargs.values())):
            return  # a closure computes inside of the step: the next one has been seen
        used = [call for call in self.calls if call.grads]
        _hand_over(optimizer, _only(used, optimizer))


def _only(calls: Sequence[_Call], optimizer: Optimizer) -> _Call:
    """The call that a step consists of; of accumulated ones the last."""
    modules = {id(call.module): call.module for call in calls}
    if len(modules) != 1:
        names = ", ".join(type(each).__name__ for each in modules.values()) or "none"
        raise UsageError(
            "a loop of one's own is planned from the one module that it calls, and before the "
            f"first step of its {type(optimizer).__name__} it called {names}; put them into one "
            f"module, or {_INSTEAD}."
        )
    return calls[-1]


def _hand_over(optimizer: Optimizer, call: _Call) -> None:
    leaves, spec = tree.tree_flatten(call.given)
    places, grads = list(call.grads), list(call.grads.values())
    whole = next((len(each) for each in leaves if _has_rows(each)), 0)
    if not whole:
        name = type(call.module).__name__
        raise UsageError(f"{name} was called without a tensor that has rows; {_INSTEAD}.")
    everything = [*leaves, *grads]
    rows = [i for i, each in enumerate(everything) if _has_rows(each) and len(each) == whole]
    batch = [everything[i].detach() for i in rows]
    fixed = [None if i in rows else each for i, each in enumerate(everything)]
    shape = tree.tree_unflatten(range(len(leaves)), spec)
    again = _Again(call.module, shape, len(leaves), rows, fixed, places, call.autocast)
    device = str(next(call.module.parameters()).device)
    hand_over(
        Rehearsal(call.module, batch, again, optimizer.step, optimizer, dealt(), device)
    )


@dataclass
class _Again:
    """The same call; what has a row for each example comes with the batch."""

    module: nn.Module
    #: the arguments, with the places of their values
    shape: Any
    inputs: int
    rows: Sequence[int]
    fixed: Sequence[Any]
    places: Sequence[int]
    autocast: torch.dtype | None

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        values = list(self.fixed)
        for i, part in zip(self.rows, batch, strict=True):
            values[i] = part
        args, kwargs = tree.tree_map(values.__getitem__, self.shape)
        kind = batch[0].device.type
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            output = tree.tree_leaves(self.module(*args, **kwargs))
        back = zip(self.places, values[self.inputs :], strict=True)
        return torch.stack([(output[i] * grad).sum() for i, grad in back]).sum()


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
