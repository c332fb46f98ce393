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
from stratagem.state.change_tracker import (
    MODULE_ATTRIBUTES,
    PLAIN,
    difference,
    layout,
    snapshot,
    state_of,
    version_of,
)


class LoopWatch:
    """Compares a model with what it was when the loop was given it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        if any(_hooks(optimizer, OPTIMIZER_HOOKS)):
            raise _hooked("the optimizer", "do what it does in the loop, around step()")
        self._check_hooks()
        self._layout = layout(model, aliases=True)
        self.mark()
        self.mark_state()

    def check(self) -> None:
        """Refuse hooks, other parts, and other attributes."""
        self._check_hooks()
        if names := difference(self._layout, layout(self._model, aliases=True)):
            raise NotDistributable(
                f"{names[-1]!r} of the model has been replaced behind prepare, and the other "
                "processes keep what was there; write into it (`with torch.no_grad(): "
                "p.copy_(...)`, load_state_dict without assign=True), or replace it before prepare."
            )
        if names := difference(self._attributes, self._look()):
            raise NotDistributable(
                f"the attribute {names[-1]!r} of the model has changed behind prepare (by the "
                "loop, or in a forward without gradients), and the other processes do not follow; "
                "set it before prepare, or keep it in a buffer and write into that."
            )

    def mark(self) -> None:
        """What a pass through the model has changed is the model's own doing."""
        self._attributes = self._look()

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
        """Whether the loop has put other state into the optimizer since the mark."""
        return self._state != self._state_now()

    def mark_state(self) -> None:
        """The state is what all processes have."""
        self._state = self._state_now()

    def _look(self) -> dict[str, Any]:
        shared = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}

        def other(value: Any) -> Any:
            """Whatever is written into tensors that all stages share."""
            written = isinstance(value, Tensor) and id(value) not in shared
            return id(value), version_of(value) if written else 0

        return {
            f"{path}.{name}".lstrip("."): v if type(v) in PLAIN else snapshot(v, other)
            for path, part in self._model.named_modules()
            for name, v in vars(part).items()
            if name not in MODULE_ATTRIBUTES
        }

    def _state_now(self) -> tuple[int, Any, list[int]]:
        """What is shared may be written to; of numbers (Adam's step) some processes have theirs."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        written = [
            version_of(value)
            for param in params
            for value in self._optimizer.state.get(param, {}).values()
            if isinstance(value, Tensor) and not value.dim()
        ]
        return len(params), state_of(self._optimizer, params, versions=False), written


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
