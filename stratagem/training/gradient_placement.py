"""Weight gradients of linear layers, computed in the memory from which they are sent.

Backward makes a gradient in fresh memory, from which it is copied into a bucket or a worker's
outbox. With a core for each replica and all of them copying at once, that takes a fifth of a step.
A linear layer's weight gradient is one matrix product, which can be written there directly:

    x, dy -> dy' x -> fresh memory -> bucket       by default
    x, dy -> dy' x ----------------> bucket       at home
    x, dy -------------------------> factors      each replica multiplies its slice (factors.py)

The product is the same to the bit, and autograd takes that memory for the gradient's own. But a
user's forward may copy its layers, run them twice or differentiate them; so this is only for stacks
of torch's own layers without hooks: there, only torch's code runs between x and dy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from stratagem.compat.torch_names import MODULE_HOOKS, accumulator, has_global_hooks, will_run
from stratagem.state.factors import Factors

#: elements of a weight; for a smaller one the copy costs less than this
WORTH = 1 << 16

_TORCHS_OWN = nn.Linear.forward


class PlacedGradients:
    """The linear layers of a module, and the memory for each weight gradient: its home."""

    def __init__(self, module: nn.Module, homes: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """`homes`: parameters, and memory of the same shape and type for their gradients."""
        self._module = module
        self._homes: dict[Tensor, Tensor] = {
            param: home
            for param, home in homes
            if param.device.type == "cpu" and param.is_floating_point() and param.numel() >= WORTH
        }
        #: weights whose gradient is sent as x and dy, not as their product
        self.factors: dict[Tensor, Factors] = {}
        self._lent: set[Tensor] = set()
        self._lending = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the module's forward in this block."""
        layers = self._layers() if self._homes else []
        for layer in layers:
            vars(layer)["forward"] = _forward(self, layer)
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]

    def _layers(self) -> list[nn.Linear]:
        """The layers whose gradients have a home; none if a user's code may run in between.

        Looked up for every forward: callbacks may have added a hook, or another layer.
        """
        patched = nn.Linear.forward is not _TORCHS_OWN or nn.functional.linear is not linear
        if patched or has_global_hooks():
            return []
        layers = []
        for module in self._module.modules():
            if not is_torchs(module) or not _is_bare(module):
                return []  # mostly at once: the model itself comes first
            if type(module) is nn.Linear and module.weight in self._homes:
                layers.append(module)
        return layers

    def weights(self) -> list[Tensor]:
        """The weights whose gradients can have a home, by types alone: the same on all replicas."""
        modules = list(self._module.modules())
        if not all(map(is_torchs, modules)):
            return []
        found = (m.weight for m in modules if type(m) is nn.Linear and m.weight in self._homes)
        return list(dict.fromkeys(found))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass in this block; gradients of any other pass are not placed."""
        self._lent.clear()
        self._lending = True
        try:
            yield
        finally:
            self._lending = False

    def gradient(self, weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
        """Return the weight's gradient, at home if possible; None if its factors were taken."""
        if not self._may_lend(weight):
            return dy.t().mm(x)
        self._lent.add(weight)
        factors = self.factors.get(weight)
        if factors is not None and factors.keep(dy, x):
            return None
        return self.product(weight, dy, x)

    def product(self, weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient at home."""
        home = self._homes[weight].detach()  # an alias that only the gradient will hold
        return torch.mm(dy.t(), x, out=home)

    def _may_lend(self, weight: Tensor) -> bool:
        """Whether this pass may write the gradient at home: once, and with no sum there yet."""
        return (
            self._lending
            and weight not in self._lent
            and weight.grad is None
            and not weight._backward_hooks
            and _accumulates(weight)
        )


class FactoredGradients(PlacedGradients):
    """Gradients that come in factors only; a product has no home."""

    def product(self, weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        return dy.t().mm(x)


class AddedGradients(PlacedGradients):
    """Gradients of microbatches: one product over the rows of many of them.

    Autograd would make one product for each, in fresh memory, and add it to the sum. The gradient
    of x does not wait for the product. Rows are kept while they are smaller than the gradient.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """`layers` run one after another; nothing else may run between them."""
        held = nn.ModuleList(dict.fromkeys(layers))
        super().__init__(held, ((param, param) for param in held.parameters()))
        self._lending = True
        #: by weight, dy and x of the microbatches that are not in its gradient yet
        self._waiting: dict[Tensor, list[tuple[Tensor, Tensor]]] = {}
        #: how many microbatches had no product of their own
        self.added = 0

    def gradient(self, weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
        if not self._may_add(weight, weight.grad):
            return dy.t().mm(x)
        waiting = self._waiting.setdefault(weight, [])
        waiting.append((dy, x.detach()))
        self.added += 1
        if sum(len(x) for _, x in waiting) * sum(weight.shape) > weight.numel():
            self._multiply(weight, self._waiting.pop(weight))
        return None

    def settle(self) -> None:
        """Complete every weight's gradient after the last microbatch."""
        while self._waiting:
            self._multiply(*self._waiting.popitem())

    def forget(self) -> None:
        """Drop, before a batch, the rows of a batch that broke off."""
        self._waiting.clear()

    @staticmethod
    @torch.no_grad()
    def _multiply(weight: Tensor, waiting: list[tuple[Tensor, Tensor]]) -> None:
        dy, x = map(torch.cat, zip(*waiting, strict=True)) if len(waiting) > 1 else waiting[0]
        if weight.grad is None:
            weight.grad = dy.t().mm(x)
        else:
            weight.grad.addmm_(dy.t(), x)

    def _may_add(self, weight: Tensor, sum_: Tensor | None) -> bool:
        return (
            not torch.is_grad_enabled()
            and not weight._backward_hooks
            and not weight._post_accumulate_grad_hooks
            and (sum_ is None or _is_plain(sum_, weight.dtype))
            and _accumulates(weight)
        )


def _is_plain(sum_: Tensor, dtype: torch.dtype) -> bool:
    return sum_.layout is torch.strided and sum_.dtype is dtype and not sum_.requires_grad


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is of one of torch's own types."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _is_bare(module: nn.Module) -> bool:
    """Whether calling a module runs the code of its type alone."""
    own = vars(module)
    return "forward" not in own and not any(own.get(hooks) for hooks in MODULE_HOOKS)


def is_unseen(params: Iterable[Tensor]) -> bool:
    """Whether the exchange alone has hooks on gradients.

    Hooks of any parameter count: they may read the gradient of another one.
    """
    return not torch.is_anomaly_enabled() and not any(
        p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > 1 for p in params
    )


def is_kept(param: Tensor) -> bool:
    """Whether the node that adds to `param.grad` is kept alive, as a hook on it does. Slow.

    A node that is not kept is freed, and the next one bears no mark.
    """
    node: Any = accumulator(param)
    node.metadata["stratagem"] = True
    del node
    again: Any = accumulator(param)
    return "stratagem" in again.metadata


def _accumulates(weight: Tensor) -> bool:
    """Whether the pass under way will add to `weight.grad`: torch.autograd.grad does not."""
    node = accumulator(weight)
    try:
        return will_run(node)
    except RuntimeError:  # raised within torch.autograd.grad
        return False


def _forward(host: PlacedGradients, layer: nn.Linear) -> Callable[[Tensor], Any]:
    def forward(input: Tensor) -> Any:
        weight, bias = layer.weight, layer.bias
        if (
            type(input) is Tensor
            and input.dim() == 2
            and input.dtype is weight.dtype
            and input.device == weight.device
            and input.layout is torch.strided
            and not input.is_nested
            and (bias is None or bias.shape == weight.shape[:1])
            and not torch.is_autocast_enabled("cpu")
        ):
            return _Linear.apply(host, input, weight, bias)  # type: ignore[no-untyped-call]
        return linear(input, weight, bias)

    return forward


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, host: PlacedGradients, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        _, need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.host, ctx.owner = host, weight  # what is saved may come back as another tensor
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, need_x, need_weight, need_bias = ctx.needs_input_grad
        (dy,) = grads
        dx = dy.mm(weight) if need_x else None
        dw = ctx.host.gradient(ctx.owner, dy, x) if need_weight else None
        return None, dx, dw, dy.sum(0) if need_bias else None
