"""What a custom loop changes of its model and optimizer that the other processes would not follow.

The loop runs in the first process. Other processes have models of their own, whose parameters,
buffers and optimizer state alone are shared; whatever else the loop changes is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.compat.torch_names import (
    MODULE_HOOKS,
    OPTIMIZER_HOOKS,
    TENSOR_HOOKS,
    accumulator,
    will_run,
)
from stratagem.errors import NotDistributable

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
#: what every module has; whether it trains, and its hooks, are looked at elsewhere
_TORCHS = frozenset(vars(nn.Module()))


class LoopWatch:
    """Compares a model with what it was when the loop was given it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        if any(_hooks(optimizer, OPTIMIZER_HOOKS)):
            raise _hooked("the optimizer", "do what it does in the loop, around step()")
        self._check_hooks()
        self._tensors, self._parts = self._layout(), self._attributes()
        self._state = self._state_now()

    def check(self) -> None:
        """Refuse hooks, other parts, and other attributes."""
        self._check_hooks()
        tensors, parts = self._layout(), self._attributes()
        if name := _difference(self._tensors, tensors):
            raise NotDistributable(
                f"{name} of the model has been replaced behind prepare, and the other processes "
                "keep what was there; write into it (`with torch.no_grad(): p.copy_(...)`, "
                "load_state_dict without assign=True), or replace it before prepare."
            )
        if name := _difference(self._parts, parts):
            raise NotDistributable(
                f"the attribute {name} of the model has changed behind prepare (by the loop, or in "
                "a forward without gradients), and the other processes do not follow; set it "
                "before prepare, or keep it in a buffer and write into that."
            )

    def settle(self) -> None:
        """What a pass through the model has changed is the model's own doing."""
        self._parts = self._attributes()

    def _check_hooks(self) -> None:
        """Refuse hooks on modules and parameters: they would run by microbatch, and elsewhere."""
        for name, part in self._model.named_modules():
            if any(_hooks(part, MODULE_HOOKS)):
                raise _hooked(f"the module {name!r}", "put what it does into forward")
        for name, param in self._model.named_parameters():
            if any(_hooks(param, TENSOR_HOOKS)):
                raise _hooked(f"the parameter {name!r}", "change p.grad behind backward")

    def check_step_hooks(self, ours: int) -> None:
        """Refuse a hook before steps that came later than ours."""
        if len(list(_hooks(self._optimizer, OPTIMIZER_HOOKS[:1]))) > ours:
            raise _hooked("the optimizer", "do what it does in the loop, before step()")

    def state_replaced(self) -> bool:
        """Whether the loop has put other state into the optimizer since `state_known`."""
        return self._state != self._state_now()

    def state_known(self) -> None:
        """The state is what all processes have."""
        self._state = self._state_now()

    def _layout(self) -> dict[str, Any]:
        model = self._model
        named: list[Iterable[tuple[str, Any]]] = [
            model.named_modules(remove_duplicate=False),
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        ]
        return {repr(name): id(each) for kind in named for name, each in kind}

    def _attributes(self) -> dict[str, Any]:
        own = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}
        return {
            repr(f"{path}.{name}".lstrip(".")): _snapshot(value, own)
            for path, part in self._model.named_modules()
            for name, value in vars(part).items()
            if name not in _TORCHS
        }

    def _state_now(self) -> list[Any]:
        return [
            (name, id(value) if isinstance(value, Tensor) else value)
            for group in self._optimizer.param_groups
            for param in group["params"]
            for name, value in (("", None), *self._optimizer.state.get(param, {}).items())
        ]


def refuse_other_backwards(anchor: Tensor) -> None:
    """In a backward: refuse one that does not add to the gradients of all parameters."""
    try:
        whole = will_run(accumulator(anchor))
    except RuntimeError:  # torch's way to say that this is autograd.grad
        whole = False
    if not whole or torch.is_grad_enabled():
        raise NotDistributable(
            "processes add gradients to p.grad of all parameters, so torch.autograd.grad, "
            "backward(inputs=) and create_graph=True cannot go through them; call backward() and "
            "read p.grad, or use a MirroredStrategy."
        )


def _snapshot(value: Any, own: set[int]) -> Any:
    """What tells later whether this is still the same value. `own`: ids of tensors that processes
    share, whatever is written into them."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if id(value) in own else value._version
    if isinstance(value, dict):
        return id(value), [(key, _snapshot(each, own)) for key, each in value.items()]
    if isinstance(value, list | tuple | set):
        return id(value), [_snapshot(each, own) for each in value]
    return id(value)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first name that is new, gone, or of something else; the innermost one of several."""
    if before == now:
        return None
    return next(n for n in reversed({**before, **now}) if before.get(n, n) != now.get(n, n))


def _hooks(owner: Any, kinds: Iterable[str]) -> Iterable[Any]:
    """Those of the user; torch's older norms of weights have theirs on the module."""
    for kind in kinds:
        for hook in (getattr(owner, kind, None) or {}).values():
            if not type(hook).__module__.startswith("torch.nn.utils."):
                yield hook


def _hooked(what: str, remedy: str) -> NotDistributable:
    return NotDistributable(
        f"{what} has a hook, which would run by microbatch, or in another process, where the loop "
        f"does not see it; take it away, and {remedy}."
    )
