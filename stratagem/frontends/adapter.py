"""One copy of a torch module on one device: rows to a loss, gradients to an update; outputs of
several, joined."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sources import Portion
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings

_NO_CAST = nullcontext()


class Training(NamedTuple):
    """Module, optimizer, recipe and settings, from which a step is made."""

    module: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    settings: Settings


class TorchAdapter:
    """A module with its loss and optimizer, as every step uses them."""

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


# --- What `predict` returns: outputs of shares, joined row after row ------------------------------


#: stands for the name of a NamedTuple among its fields, which travel as a dict
_KIND = "<kind>"
#: those that a model has returned here, by name
_kinds: dict[str, type[Any]] = {}


def with_row(output: Any, target: Any) -> Any:
    """The output for one example with its row, where `squeeze()` in forward has taken that, too:
    on one device the batch has others beside it, and none is taken. A single number that is to be
    trained on without a target may be anything, a loss that the model computes itself, say."""
    if not isinstance(output, Tensor) or output.dim():
        return output
    beside = isinstance(target, Tensor) and target.shape == (1,) and target.is_floating_point()
    return output[None] if beside or not torch.is_grad_enabled() else output


def on_cpu(output: Any) -> Any:
    """A share's output, on the CPU; refused if it could not be joined with others."""
    if isinstance(output, Tensor) and output.dim():
        return output.detach().cpu()
    if isinstance(output, dict):
        return {key: on_cpu(value) for key, value in output.items() if value is not None}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        kind = f"{type(output).__module__}.{type(output).__qualname__}"
        _kinds[kind] = type(output)
        fields = zip(output._fields, output, strict=True)
        return {_KIND: kind, **{field: on_cpu(value) for field, value in fields}}
    if isinstance(output, list | tuple):
        return [on_cpu(value) for value in output]
    what = "tensor without rows" if isinstance(output, Tensor) else type(output).__name__
    raise UsageError(
        f"predict joins the outputs of all batches row by row, and the model's output has a {what} "
        "in it; return tensors with a row for each example, or tuples, lists or dicts of them. (Of "
        "a share of one example, squeeze() takes the row away; squeeze(1) does not.)"
    )


def check_rows(parts: Sequence[Any], examples: Sequence[int]) -> None:
    """Raise if outputs of shares, one after the other, are not the output of the whole.

    They are if every example has as many rows in one share as in another, which is mostly one.
    """
    first = parts[0]
    if isinstance(first, dict | list | tuple):
        for key in first if isinstance(first, dict) else range(len(first)):
            check_rows([part[key] for part in parts], examples)
        return
    if not isinstance(first, Tensor):
        return
    each, left = divmod(first.shape[0] if first.dim() else 1, examples[0])
    for part, rows in zip(parts, examples, strict=True):
        if left or not part.dim() or len(part) != each * rows:
            raise NotDistributable(
                f"predict joins the shares of replicas row by row, and an output of shape "
                f"{tuple(part.shape)} for {rows} examples does not begin with its rows; have the "
                "model return it with the examples first (transpose it), or predict on one device."
            )


def joined(parts: list[Any]) -> Any:
    """Join the outputs of several shares."""
    if not parts:
        return torch.empty(0)
    first = parts[0]
    if isinstance(first, Tensor):
        odd = next((p for p in parts if p.shape[1:] != first.shape[1:]), None)
        if odd is not None:
            raise UsageError(
                "predict joins the outputs of all batches row by row, and the model returns rows "
                f"of shape {tuple(first.shape[1:])} and of {tuple(odd.shape[1:])} for different "
                "batches or shares (padded to the longest?); pad to a fixed length."
            )
        return torch.cat(parts)
    if isinstance(first, dict):
        whole = {key: joined([part[key] for part in parts]) for key in first if key != _KIND}
        return _named(first[_KIND], whole) if _KIND in first else whole
    return tuple(joined([part[i] for part in parts]) for i in range(len(first)))


def _named(kind: str, fields: dict[str, Any]) -> Any:
    """The NamedTuple; one with the same fields where no example has come to, and so none of it."""
    made = _kinds.get(kind) or namedtuple(kind.rpartition(".")[2], fields)
    return made(**fields)
