"""Hooks on parameters and optimizers: `fit` on several replicas refuses them.

They are not sent with a model. Where every worker has put its own in place they still see a part
of the gradient, and what one clips of a part is not what one would clip of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stratagem.errors import NotDistributable
from stratagem.rules.updates import Asynchronous
from stratagem.strategies.strategy import Strategy

_ON_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_ON_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def refuse_on_parameters(strategy: Strategy, module: nn.Module) -> None:
    """Refuse hooks of the user's on a gradient that is put together from several replicas."""
    if strategy.team.size == 1 or _everybody_for_himself(strategy):
        return
    for name, param in module.named_parameters():
        if param.requires_grad and _has(param, _ON_PARAMETERS):
            raise NotDistributable(
                f"parameter {name!r} has a hook, which would see the gradient of one replica only, "
                "and does not reach the other replicas; use hooks on modules, clip_norm or "
                "clip_value of compile (clipnorm or clipvalue of a Keras optimizer), or a loop of "
                "your own with strategy.prepare, which may change gradients after backward."
            )


def refuse_on_optimizer(strategy: Strategy, optimizer: Optimizer) -> None:
    """Refuse hooks of the user's on an optimizer whose steps are made elsewhere, too."""
    elsewhere = strategy.served or len(strategy.team.devices) > 1
    step = vars(optimizer).get("step")
    if elsewhere and step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise NotDistributable(
            "the optimizer's step() was replaced, which does not reach the replicas or servers "
            "that make its steps; make a subclass of the optimizer, or use a callback of fit."
        )
    if elsewhere and _has(optimizer, _ON_OPTIMIZERS):
        raise NotDistributable(
            "the optimizer has a hook (register_step_pre_hook or register_step_post_hook), which "
            "does not reach the replicas or servers that make its steps; use a callback of fit, "
            "clip_norm or clip_value of compile, or a MirroredStrategy in a loop of your own."
        )


def _everybody_for_himself(strategy: Strategy) -> bool:
    """Whether each worker ran the script itself, and its gradient alone makes an update."""
    team, served = strategy.team, strategy.settings.served
    alone = team.place is not None and len(team.devices) == 1
    return alone and served is not None and isinstance(served.updates, Asynchronous)


def _has(owner: Any, kinds: Iterable[str]) -> bool:
    hooks = (hook for kind in kinds for hook in (getattr(owner, kind, None) or {}).values())
    return any(not _ours(hook) for hook in hooks)


def _ours(hook: Any) -> bool:
    """One that a training which was cut short has left behind."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("stratagem.")
