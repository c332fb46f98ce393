"""One of several processes that have one model together, whose custom loop runs in the first.

Parameters, gradients and the optimizer's state lie in memory that all share. The first process
says a verb (led_loop.py), and the others do it:

    StagePasses      each has some layers (stage_passes.py)
    DividedPasses    each has a part of every layer (divided_passes.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shares import map_parts
from stratagem.errors import NotDistributable
from stratagem.state.shared_model import SharedTensors, shared_views
from stratagem.training.command_loop import CommandLoop
from stratagem.training.replica import Replica
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


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with other tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    return map_parts(lambda part: with_tensors(part, change), tree)
