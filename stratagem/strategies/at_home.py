"""Weight gradients of linear layers, computed where they are to lie.

Backward makes a gradient in fresh memory, from where it is copied to where others find it: into a
bucket, or a worker's outbox. With a core for each replica and all of them copying at once, that
takes a fifth of a step. A linear layer's weight gradient is one matrix product, which can as well
be written there at once:

    x, dy -> dy' x -> fresh memory -> bucket       as it comes
    x, dy -> dy' x ----------------> bucket       at home

The product is the same to the bit. Autograd takes that memory for the gradient's own, so
hooks, accumulation and everything else that hangs on `p.grad` goes on as if nothing had happened.
Wherever a second writer could come (a weight used twice, a gradient that is already there, one that
somebody else asked for), memory is fresh as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear

#: elements of a weight; a smaller one is copied sooner than it takes to go this way
WORTH = 1 << 16

#: by weight: whose layers are at work
_hosts: dict[Tensor, AtHome] = {}


class AtHome:
    """The linear layers of a module, which know where their weight gradients are to lie.

    Forward and backward both belong into `working`: a checkpointed forward runs again in backward.
    Only within `lending` are gradients written there, since no other backward's are meant for it.
    """

    def __init__(
        self, modules: Iterable[nn.Module], homes: Iterable[tuple[nn.Parameter, Tensor]]
    ) -> None:
        """`homes`: parameters, and memory of the same shape and type for their gradients."""
        self._homes: dict[Tensor, Tensor] = {
            param: home for param, home in homes
            if param.device.type == "cpu" and param.numel() >= WORTH
        }  # fmt: skip
        self._layers = [
            (layer, layer.weight) for layer in modules
            if type(layer) is nn.Linear and layer.weight in self._homes
            and "forward" not in vars(layer)
        ]  # fmt: skip
        self._lent: set[Tensor] = set()
        self._lending = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around forward and backward."""
        for layer, weight in self._layers:
            # bound, so that a copy which somebody makes in between is bound to the copy
            vars(layer)["forward"] = MethodType(forward, layer)
            _hosts[weight] = self
        try:
            yield
        finally:
            for layer, weight in self._layers:
                vars(layer).pop("forward", None)
                _hosts.pop(weight, None)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Around the backward pass whose gradients belong there."""
        self._lent.clear()
        self._lending = True
        try:
            yield
        finally:
            self._lending = False

    def lend(self, weight: Tensor) -> Tensor | None:
        """The home of this weight's gradient, once a pass; None where it may not be written."""
        if not self._lending or weight in self._lent or weight.grad is not None:
            return None
        self._lent.add(weight)
        return self._homes[weight].detach()  # an alias that only the gradient will hold


def forward(self: nn.Linear, input: Tensor) -> Any:
    """In place of nn.Linear's; whatever is not a plain product of matrices goes its usual way."""
    if (
        not torch.compiler.is_compiling()
        and self.weight in _hosts
        and type(input) in (Tensor, nn.Parameter)
        and input.dim() > 1
        and input.dtype is self.weight.dtype
        and input.device == self.weight.device
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    ):
        host = _hosts[self.weight]
        return _Linear.apply(host, input, self.weight, self.bias)  # type: ignore[no-untyped-call]
    return linear(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, host: AtHome, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.host, ctx.owner = host, weight  # what is saved may come back as another tensor
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, need_x, need_weight, need_bias = ctx.needs_input_grad
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dx = dw = db = None
        if need_x:
            dx = dy.mm(weight).view(x.shape)
        if need_weight:
            rows = x.reshape(-1, x.shape[-1])
            home = ctx.host.lend(ctx.owner)
            dw = dy.t().mm(rows) if home is None else torch.mm(dy.t(), rows, out=home)
        if need_bias:
            db = dy.sum(0)
        return None, dx, dw, db

