"""One copy of a torch module on one device: rows to a loss, gradients to an update."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.frontends.outputs import with_row
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sources import Portion
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings

_NO_CAST = nullcontext()


class Training(NamedTuple):
    """What is trained, and how: all that a step is made from, beside its replica."""

    module: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    settings: Settings


class TorchAdapter:
    """What a step asks of a module, its loss and its optimizer, wherever the gradients go."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, recipe: Recipe, replica: Replica
    ) -> None:
        """Without an optimizer it evaluates only."""
        self.module, self.recipe = module, recipe
        if optimizer is not None:
            self.optimizer = optimizer
            # clipping looks at all of them, so none may keep a gradient that others do not have
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._params = list(dict.fromkeys([*module.parameters(), *held]))
        self.replica = replica
        self.device = replica.device
        self._run: nn.Module = torch.compile(module) if recipe.jit_compile else module  # type: ignore[assignment]
        self._elsewhere = self.device.type != "cpu"
        half = recipe.autocast is torch.float16
        self.scaler: Any = torch.amp.GradScaler(self.device.type) if half else None
        if self.scaler is not None:  # it makes its scale at the first loss; empty shares have none
            self.scaler.scale(torch.zeros((), device=self.device))

    def forward(self, portion: Portion) -> tuple[Any, Any, Any]:
        """Outputs, targets and sample weights of a share, on the device."""
        x, y, weight = portion.x, portion.y, portion.weight
        if self._elsewhere:
            x, y, weight = to_device((x, y, weight), self.device)
        output = call(self._run, x)
        return output if portion.examples > 1 else with_row(output, y), y, weight

    def autocast(self) -> Any:
        if self.recipe.autocast is None:
            return _NO_CAST
        return torch.autocast(self.device.type, self.recipe.autocast)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self) -> None:
        recipe = self.recipe
        if recipe.clip_norm is None and recipe.clip_value is None:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), recipe.clip_norm)
        if recipe.clip_value is not None:
            nn.utils.clip_grad_value_(self.module.parameters(), recipe.clip_value)

    def update(self) -> None:
        """Clip, step, forget the gradients."""
        self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """What `optimizer.zero_grad()` does, without its profiling hooks."""
        for param in self._params:
            param.grad = None


def call(module: nn.Module, x: Any) -> Any:
    """Several inputs come as a tuple or list, named ones as a dict; a NamedTuple (a
    PackedSequence, say) is one."""
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return module(*x)
    if isinstance(x, dict):
        return module(**x)
    return module(x)
