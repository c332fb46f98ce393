"""One of several processes that share one model, for a custom loop that runs in the first process.

Parameters, gradients and the optimizer's state are in shared memory. The first process sends
commands (led_loop.py), which the other processes carry out:

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

from stratagem.capabilities import sentence
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
from stratagem.state.optimizer_state import params_of
from stratagem.state.shared_model import SharedTensors, shared_views
from stratagem.training.replica import CommandLoop, Replica
from stratagem.wire.shared_memory import sharing


@dataclass
class Mode:
    """The state of the model that a forward is traced for; sent by the first process."""

    #: names of the arguments that the loop passes to the model
    names: list[str]
    #: whether each module is in training mode, and each parameter requires a gradient
    training: list[bool]
    trained: list[bool]


class LoopProcess(ABC):
    """One process, and the commands that it carries out. Made collectively."""

    def __init__(
        self, replica: Replica, model: nn.Module, optimizer: Optimizer, shared: Iterable[Tensor]
    ) -> None:
        """`shared`: the tensors that all processes share, among them the parameters."""
        self._replica, self._collective = replica, sharing(replica.collective)
        self._model, self._optimizer = model, optimizer
        self._params = list(model.parameters())
        self._shared = SharedTensors(shared, self._collective, keeps=False)
        homes = {p: view for p, view, _ in shared_views(self._params, self._collective)}
        #: the shared memory of each parameter's gradient
        self._homes = [homes[param] for param in self._params]
        #: divisions of the model, one for each mode
        self._splits: list[Any] = []
        #: by number, the forwards that a backward may follow
        self._passes: dict[int, Any] = {}
        self._autocast: list[Any] = [False, "bfloat16"]
        self._rows = 0
        self._commands = CommandLoop(replica.collective)

    @abstractmethod
    def _split(self, told: dict[str, Any], x: dict[str, Any] | None = None) -> None:
        """Divide the model for a `Mode`; the first process has a batch `x`. Collective."""

    @abstractmethod
    def _play_forward(self, *told: Any) -> None:
        """Run a forward as the first process has commanded."""

    @abstractmethod
    def _play_backward(
        self, number: int, there: list[bool], grads: Sequence[Tensor | None]
    ) -> list[int]:
        """Run a backward; returns the indices of the parameters that have a gradient after it."""

    @abstractmethod
    def _own(self) -> None:
        """Give every process the optimizer state of the parameters that it steps. Collective."""

    @abstractmethod
    def _before_update(self, there: list[bool]) -> None:
        """Give parameters the gradients that this process' own optimizer steps with."""

    @abstractmethod
    def _finish_step(self) -> None:
        """Complete the update after the optimizer's step, and publish it. Collective."""

    # --- the other processes ----------------------------------------------------------------

    def serve(self) -> None:
        """Carry out the first process' commands until its loop is over."""
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
        for group, told in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(told)
        self._before_update(there)
        self._optimizer.step()
        self._finish_step()

    # --- all processes ----------------------------------------------------------------------

    def _become(self, mode: Mode) -> None:
        for part, training in zip(self._model.modules(), mode.training, strict=True):
            part.training = training
        for param, trained in zip(self._params, mode.trained, strict=True):
            param.requires_grad_(trained)

    def _cast(self) -> AbstractContextManager[Any]:
        enabled, name = self._autocast
        return torch.autocast("cpu", getattr(torch, name), enabled=enabled)

    def _lent(self, index: int) -> Tensor:
        """Return a new view of the shared gradient, which `p.grad.data = ...` does not move."""
        return self._homes[index].detach()

    def _handed_in(self) -> list[bool]:
        """Return which parameters have a gradient; copy back those that the loop has replaced."""
        for index, (param, home) in enumerate(zip(self._params, self._homes, strict=True)):
            if param.grad is None:
                continue
            if param.grad.layout is not torch.strided:
                raise NotDistributable(sentence("one copy", "sparse gradients in a loop"))
            if param.grad.data_ptr() != home.data_ptr():
                home.copy_(param.grad)
                param.grad = self._lent(index)
        return [param.grad is not None for param in self._params]


# --- changes that the other processes would miss --------------------------------------------------
#
# The loop runs in the first process. The other processes have copies of the model, of which only
# parameters, buffers and optimizer state are shared. Any other change by the loop is refused.


class LoopWatch:
    """Refuses changes of a model and its optimizer since `prepare`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        if any(_hooks(optimizer, OPTIMIZER_HOOKS)):
            raise _hooked("the optimizer", "do what it does in the loop, around step()")
        self._check_hooks()
        self._layout = layout(model, aliases=True)
        self._stepped = params_of(optimizer)
        self.mark()
        self.mark_state()

    def check(self) -> None:
        """Refuse hooks, replaced modules or tensors, and changed attributes."""
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
        self._check_groups()

    def mark(self) -> None:
        """Accept the attributes as they are: a pass through the model may change them."""
        self._attributes = self._look()

    def _check_hooks(self) -> None:
        """Refuse hooks on modules and parameters: other processes would run them by microbatch."""
        for name, part in self._model.named_modules():
            if any(_hooks(part, MODULE_HOOKS)):
                raise _hooked(f"the module {name!r}", "put what it does into forward")
        for name, param in self._model.named_parameters():
            if any(_hooks(param, TENSOR_HOOKS)):
                raise _hooked(f"the parameter {name!r}", "change p.grad behind backward")

    def check_step(self, ours: int) -> None:
        """Refuse other groups, and step hooks beyond the first `ours`, stratagem's own."""
        self._check_groups()
        if len(list(_hooks(self._optimizer, OPTIMIZER_HOOKS[:1]))) > ours:
            raise _hooked("the optimizer", "do what it does in the loop, before step()")

    def _check_groups(self) -> None:
        if list(map(id, params_of(self._optimizer))) != list(map(id, self._stepped)):
            raise NotDistributable(sentence("one copy", "parameters added in a loop"))

    def state_replaced(self) -> bool:
        """Whether the loop has replaced optimizer state since the mark."""
        return self._state != self._state_now()

    def mark_state(self) -> None:
        """Accept the optimizer's state as the one that all processes have."""
        self._state = self._state_now()

    def _look(self) -> dict[str, Any]:
        shared = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}

        def other(value: Any) -> Any:
            """Return the identity of a value; writes count only for tensors that are not shared."""
            written = isinstance(value, Tensor) and id(value) not in shared
            return id(value), version_of(value) if written else 0

        return {
            f"{path}.{name}".lstrip("."): v if type(v) in PLAIN else snapshot(v, other)
            for path, part in self._model.named_modules()
            for name, v in vars(part).items()
            if name not in MODULE_ATTRIBUTES
        }

    def _state_now(self) -> tuple[int, Any, list[int]]:
        """Return the identity of the optimizer's state.

        Shared tensors may be written into; scalars (Adam's step) are not shared, so writes count.
        """
        params = params_of(self._optimizer)
        written = [
            version_of(value)
            for param in params
            for value in self._optimizer.state.get(param, {}).values()
            if isinstance(value, Tensor) and not value.dim()
        ]
        return len(params), state_of(self._optimizer, params, versions=False), written


def refuse_other_backwards(anchor: Tensor) -> None:
    """In a backward: refuse it unless it adds to the gradients of all parameters."""
    try:
        whole = will_run(accumulator(anchor))
    except RuntimeError:  # torch raises it in autograd.grad
        whole = False
    if not whole or torch.is_grad_enabled():
        raise NotDistributable(
            "processes add gradients to p.grad of all parameters, so torch.autograd.grad, "
            "backward(inputs=) and create_graph=True cannot go through them; call backward() and "
            "read p.grad, or use a MirroredStrategy."
        )


def _hooks(owner: Any, kinds: Iterable[str]) -> Iterable[Any]:
    """The user's hooks; those of torch.nn.utils (weight_norm) are left out."""
    for kind in kinds:
        for hook in (getattr(owner, kind, None) or {}).values():
            if not type(hook).__module__.startswith("torch.nn.utils."):
                yield hook


def _hooked(what: str, remedy: str) -> NotDistributable:
    return NotDistributable(
        f"{what} has a hook, which would run by microbatch, or in another process, where the loop "
        f"does not see it; take it away, and {remedy}."
    )
