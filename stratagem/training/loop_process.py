"""One of several processes that have one model together, whose custom loop runs in the first.

Parameters, gradients and the optimizer's state lie in memory that all share. The first process
says a verb (led_loop.py), and the others do it:

    StagePasses      each has some layers (stage_passes.py)
    DividedPasses    each has a part of every layer (divided_model.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from stratagem.state.shared_model import SharedTensors, shared_views
from stratagem.training.replica import CommandLoop, Replica
from stratagem.wire.shared_memory import sharing


@dataclass
class Mode:
    """What a forward is traced for; told by the first process."""

    #: names of the arguments that the loop gives
    names: list[str]
    #: whether each module is in training, and each parameter trained
    training: list[bool]
    trained: list[bool]


class LoopProcess(ABC):
    """One process, and what it does when the first one says so. Made collectively."""

    def __init__(
        self, replica: Replica, model: nn.Module, optimizer: Optimizer, shared: Iterable[Tensor]
    ) -> None:
        """`shared`: what all processes have together, parameters among it."""
        self._replica, self._collective = replica, sharing(replica.collective)
        self._model, self._optimizer = model, optimizer
        self._params = list(model.parameters())
        self._shared = SharedTensors(shared, self._collective, keeps=False)
        homes = {p: view for p, view, _ in shared_views(self._params, self._collective)}
        #: where gradients lie that all see
        self._homes = [homes[param] for param in self._params]
        #: of the model, one for each mode
        self._splits: list[Any] = []
        #: forwards that may be followed by a backward, by their number
        self._passes: dict[int, Any] = {}
        self._autocast: list[Any] = [False, "bfloat16"]
        self._rows = 0
        self._commands = CommandLoop(replica.collective)

    @abstractmethod
    def _split(self, told: dict[str, Any], x: dict[str, Any] | None = None) -> None:
        """Give everybody its part, for a `Mode`; the first process has a batch. Collective."""

    @abstractmethod
    def _play_forward(self, *told: Any) -> None:
        """As the first process has told."""

    @abstractmethod
    def _play_backward(
        self, number: int, there: list[bool], grads: Sequence[Tensor | None]
    ) -> list[int]:
        """Add to the gradients that are there; returns the numbers of those that are there then."""

    @abstractmethod
    def _own(self) -> None:
        """Have every process the state of what it steps. Collective."""

    @abstractmethod
    def _before_update(self, there: list[bool]) -> None:
        """Have parameters the gradients that this process' own optimizer steps with."""

    @abstractmethod
    def _finish_step(self) -> None:
        """Behind that: make the rest of the update, and have all see it. Collective."""

    # --- the other processes ----------------------------------------------------------------

    def serve(self) -> None:
        """Do what the first process says until its loop is over."""
        self._commands.serve(
            {
                "split": self._split,
                "forward": self._play_forward,
                "backward": self._play_backward,
                "step": self._follow_step,
                "own": self._own,
            }
        )

    def _follow_step(self, groups: list[dict[str, Any]], there: list[bool]) -> None:
        if len(groups) != len(self._optimizer.param_groups):
            raise NotDistributable(
                "the optimizer has got another group of parameters behind prepare, which the other "
                "processes do not know; add groups before prepare."
            )
        for group, told in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(told)
        self._before_update(there)
        self._optimizer.step()
        self._finish_step()

    # --- all of them ------------------------------------------------------------------------

    def _become(self, mode: Mode) -> None:
        for part, training in zip(self._model.modules(), mode.training, strict=True):
            part.training = training
        for param, trained in zip(self._params, mode.trained, strict=True):
            param.requires_grad_(trained)

    def _cast(self) -> AbstractContextManager[Any]:
        enabled, name = self._autocast
        return torch.autocast("cpu", getattr(torch, name), enabled=enabled)

    def _lent(self, index: int) -> Tensor:
        """The shared gradient as a tensor of its own: `p.grad.data = ...` leaves the place."""
        return self._homes[index].detach()

    def _handed_in(self) -> list[bool]:
        """Which parameters have a gradient; what the loop has put there comes into its place."""
        for index, (param, home) in enumerate(zip(self._params, self._homes, strict=True)):
            if param.grad is None:
                continue
            if param.grad.layout is not torch.strided:
                raise NotDistributable(
                    "a parameter has a sparse gradient, for which processes have no shared place; "
                    "use sparse=False."
                )
            if param.grad.data_ptr() != home.data_ptr():
                home.copy_(param.grad)
                param.grad = self._lent(index)
        return [param.grad is not None for param in self._params]


# --- what other processes would not follow --------------------------------------------------------
#
# The loop runs in the first process. Other processes have models of their own, whose parameters,
# buffers and optimizer state alone are shared; whatever else the loop changes is refused by name.


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
