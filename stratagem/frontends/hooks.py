"""Refuses what `fit` on several replicas cannot support: hooks, shared memory, autocast, Keras.

Hooks on parameters and optimizers are not sent with a model. Even if every worker registers its
own, a hook sees only a part of the gradient, and clipping a part differs from clipping the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.compat.torch_names import OPTIMIZER_HOOKS, TENSOR_HOOKS, BatchNorm
from stratagem.errors import NotDistributable, UsageError
from stratagem.strategies.strategy import Strategy
from stratagem.training.hints import tell_of_batchnorm
from stratagem.training.setup import keras_layer


def refuse_on_parameters(strategy: Strategy, module: nn.Module) -> None:
    """Raise if a parameter has a user's hook, which would see one replica's gradient only."""
    if strategy.replica_group.size == 1:
        return
    for name, param in module.named_parameters():
        if param.requires_grad and _has(param, TENSOR_HOOKS):
            raise NotDistributable(
                f"parameter {name!r} has a hook, which would see the gradient of one replica only, "
                "and does not reach the other replicas; use hooks on modules, clip_norm or "
                "clip_value of compile (clipnorm or clipvalue of a Keras optimizer), or a loop of "
                "your own with strategy.prepare, which may change gradients after backward."
            )


#: models whose BatchNorm layers were told of
_told: WeakSet[nn.Module] = WeakSet()


def warn_of_batchnorm(
    strategy: Strategy, module: nn.Module, layers: Iterable[nn.Module], kind: type = BatchNorm
) -> None:
    """Warn once of a model whose layers of this kind normalise over a replica's rows."""
    settings = strategy.settings
    if settings.sync_batchnorm or strategy.num_replicas_in_sync < 2 or module in _told:
        return
    layer = next((each for each in layers if isinstance(each, kind)), None)
    if layer is not None and getattr(layer, "trainable", True) and strategy.is_chief:
        _told.add(module)
        of = "" if settings.served is None else "a MirroredStrategy with "
        tell_of_batchnorm(layer, f"{of}sync_batchnorm=True normalises over the batch")


def refuse_on_optimizer(strategy: Strategy, optimizer: Optimizer) -> None:
    """Raise if the optimizer has a user's hook, and other processes make its steps, too."""
    elsewhere = strategy.served or len(strategy.replica_group.devices) > 1
    step = vars(optimizer).get("step")
    if elsewhere and step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise NotDistributable(
            "the optimizer's step() was replaced, which does not reach the replicas or servers "
            "that make its steps; make a subclass of the optimizer, or use a callback of fit."
        )
    if elsewhere and _has(optimizer, OPTIMIZER_HOOKS):
        raise NotDistributable(
            "the optimizer has a hook (register_step_pre_hook or register_step_post_hook), which "
            "does not reach the replicas or servers that make its steps; use a callback of fit, "
            "clip_norm or clip_value of compile, or a MirroredStrategy in a loop of your own."
        )


def _has(owner: Any, kinds: Iterable[str]) -> bool:
    hooks = (hook for kind in kinds for hook in (getattr(owner, kind, None) or {}).values())
    return any(not _ours(hook) for hook in hooks)


def _ours(hook: Any) -> bool:
    """Return whether a hook is ours, left behind by an interrupted training."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("stratagem.")


def refuse_autocast() -> None:
    """Raise inside of torch.autocast, which does not apply to the other replicas."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            "fit was called inside of torch.autocast, which the other replicas know nothing of; "
            'call it outside, and say compile(..., precision="bfloat16").'
        )


def refuse_keras(strategy: Strategy, module: nn.Module) -> None:
    """Raise for a layer of Keras in a module that is sent to other processes: it makes new
    variables there, which the optimizer that is sent with it does not have."""
    elsewhere = strategy.settings.one_copy or len(strategy.replica_group.devices) > 1
    if elsewhere and (keras := keras_layer(module)) is not None:
        raise NotDistributable(
            f"{keras!r} is a layer of Keras, whose copies in other processes the optimizer of "
            "sg.Model does not reach; compile a keras.Model in strategy.scope() and call its fit, "
            "or use a loop of your own with MirroredStrategy.prepare."
        )


def refuse_shared(module: nn.Module) -> None:
    """Raise if a trained parameter shares memory that replicas would split into copies.

    Tensors that are only read may share memory.
    """
    whose = {
        False: (0, ""),
        True: (0, ""),
    }  # the furthest end so far and its name, by whether it is trained
    for start, end, trained, name in sorted(_spans(module)):
        reach, other = max(whose.values()) if trained else whose[True]
        if start < reach:
            raise NotDistributable(
                f"{other!r} and {name!r} share memory without being the same parameter, and "
                "replicas keep each of them apart; use one parameter in both places, and transpose "
                "or cut it in forward, or a loop of your own with strategy.prepare."
            )
        whose[trained] = max(whose[trained], (end, name))


def _spans(module: nn.Module) -> Iterator[tuple[int, int, bool, str]]:
    """Yield each tensor's first address, its end, whether it is trained, and its name.

    A tied parameter counts once.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if _has_memory(tensor):
            length = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            end = start + (length + 1) * tensor.element_size()
            yield start, end, tensor.requires_grad, name


def _has_memory(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and tensor.numel() > 0 and tensor.data_ptr() != 0
