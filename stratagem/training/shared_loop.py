"""Custom loops of CPU replicas that have one set of parameters and optimizer state.

    backward          leaves the gradient of the global batch, whole, on every replica
    optimizer.step    steps about 1/N of the parameters here, the others elsewhere

So a loop may clip, look at or change gradients as ever. Parameters lie in shared memory; the state
comes into being where a parameter is stepped, and the first replica sees all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import NotDistributable
from stratagem.state.shared_model import OwnedState, SharedTensors
from stratagem.training.replica import Replica
from stratagem.wire.shared_memory import sharing


def divided(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Which parameters each of `count` replicas updates: nearly as many elements each."""
    found: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = load.index(min(load))
        found[least].append(i)
        load[least] += sizes[i]
    return [sorted(each) for each in found]


def refuse_loop(replica: Replica, optimizer: Optimizer) -> None:
    """Refuse what replicas cannot update in parts."""
    if not replica.collective.shares_memory:
        raise NotDistributable(
            "between machines and on GPUs a replica of ShardedStrategy has rows of each parameter, "
            "and a loop of your own updates whole ones; use sg.Model(...).fit, or "
            "MirroredStrategy.prepare."
        )
    if not type(optimizer).__module__.startswith("torch."):
        raise NotDistributable(
            f"each replica of ShardedStrategy steps the optimizer on some of the parameters, and "
            f"{type(optimizer).__name__} is not one of torch's, so that it may look at all of "
            "them; use one of torch.optim, or MirroredStrategy."
        )


class SharedUpdate:
    """Runs around `optimizer.step`. Made collectively."""

    def __init__(self, replica: Replica, optimizer: Optimizer) -> None:
        collective = sharing(replica.collective)
        self._replica, self._collective = replica, collective
        params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        mine = divided([p.numel() for p in params], replica.count)[replica.index]
        self._owned = {params[i] for i in mine}
        self._others = [p for p in params if p not in self._owned]
        self._shared = SharedTensors(params, collective)
        self._state = OwnedState(optimizer, self._owned, leads=replica.leads)
        self._gradients: list[Tensor | None] = []
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise NotDistributable(
                "optimizer.step(closure) evaluates the loss while replicas update their parts of "
                "the parameters; call backward first and step() without a closure, or use "
                "MirroredStrategy."
            )
        self._gradients = [p.grad for p in self._others]
        for param in self._others:
            param.grad = None
        self._collective.barrier()  # nobody reads the parameters any more

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param, gradient in zip(self._others, self._gradients, strict=True):
            param.grad = gradient
        self._gradients = []
        self._shared.take_back(self._owned)
        self._state.share(self._collective)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._shared.close()


def share_update(replica: Replica, optimizer: Optimizer) -> Callable[[], None]:
    """Have each replica step its part; return a function that undoes this. Collective."""
    return SharedUpdate(replica, optimizer).close
