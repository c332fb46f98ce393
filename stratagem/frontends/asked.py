"""Checks of the arguments of `compile`, `fit`, `evaluate` and `predict`, made before they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from stratagem import arguments
from stratagem.arguments import Args, Result
from stratagem.errors import UsageError
from stratagem.state.checkpoint_folder import Checkpoints

_PRECISION = {
    None: None,
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_LOADER = "a DataLoader reads with workers: DataLoader(..., num_workers=4)"
_AS_X = "give the DataLoader in place of x"
_RATE = "it is the optimizer's: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
_OUT = "there is nothing like it here; leave it out"
#: names of arguments in Keras or Lightning, and what to use instead
_ELSEWHERE = {
    "max_epochs": "it is epochs",
    "nb_epoch": "it is epochs",
    "workers": _LOADER,
    "use_multiprocessing": _LOADER,
    "max_queue_size": _LOADER,
    "num_workers": _LOADER,
    "train_dataloaders": _AS_X,
    "train_dataloader": _AS_X,
    "dataloaders": _AS_X,
    "val_dataloaders": "it is validation_data",
    "val_dataloader": "it is validation_data",
    "check_val_every_n_epoch": "it is validation_freq",
    "limit_train_batches": "it is steps_per_epoch",
    "limit_val_batches": "it is validation_steps",
    "accumulate_grad_batches": "it is accumulate",
    "gradient_clip_val": "it is clip_norm",
    "lr": _RATE,
    "learning_rate": _RATE,
    "run_eagerly": _OUT,
    "steps_per_execution": _OUT,
    "auto_scale_loss": _OUT,
    "devices": "devices are the strategy's: sg.MirroredStrategy([...])",
    "loss_weights": "add up the parts, each with its weight, in a loss of your own",
    "weighted_metrics": "sample weights apply to the loss only; give metrics",
}


def by_name(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """Wrap a method so that unknown arguments raise an error that names the replacement."""
    return arguments.by_name(method, _ELSEWHERE)


def checkpoints(
    given: Checkpoints | str | os.PathLike[str] | None, *, resume: bool
) -> Checkpoints | None:
    """Return `checkpoint=` as `Checkpoints`; a folder alone is enough."""
    if given is None and resume:
        raise UsageError(
            'resume=True goes on from a folder of checkpoints; name it: fit(..., checkpoint="run/",'
            " resume=True)."
        )
    return given if given is None or isinstance(given, Checkpoints) else Checkpoints(given)


def whole(least: int, **numbers: Any) -> None:
    """Raise if a number is not an integer of at least `least`; None means "not given"."""
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise UsageError(f"{name} is {value!r}; it must be a whole number.")
        if value < least:
            raise UsageError(f"{name} is {value}; it must be {least} or more.")


def positive(**numbers: Any) -> None:
    """Raise if a number is not greater than 0; None means "not given"."""
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise UsageError(f"{name} is {value}; it must be more than 0, or None for no limit.")


def listed(callbacks: Any) -> list[Any]:
    """Return callbacks as a list; like Keras, take several, a single one, or None."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]


def epochs_to_validate(often: Any) -> Collection[int]:
    """Return the epochs, counted from 0, that `validation_freq` has end with a validation."""
    if isinstance(often, Collection) and not isinstance(often, str | bytes):
        for epoch in often:
            whole(1, **{"an epoch of validation_freq": epoch})
        return frozenset(int(epoch) - 1 for epoch in often)
    often = 1 if often is None else often
    whole(1, validation_freq=often)
    return range(int(often) - 1, sys.maxsize, int(often))


def precision(name: str | None) -> torch.dtype | None:
    """Return the dtype of autocast for a name; None for no autocast."""
    if name not in _PRECISION:
        known = ", ".join(repr(name) for name in _PRECISION if name)
        raise UsageError(f"precision={name!r}; choose one of {known}.")
    return _PRECISION[name]


def fewer(known: int | None, limit: int | None) -> int | None:
    """Return the number of steps of a pass, given its length and a limit, if known."""
    return min(known, limit) if known is not None and limit is not None else known or limit


def trainable(optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer; raise if there is none, since no parameter requires a gradient."""
    if optimizer is None:
        raise UsageError(
            "the module had no parameter that requires a gradient when it was compiled; "
            "unfreeze what shall be trained, then compile again."
        )
    return optimizer
