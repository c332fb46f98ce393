"""`fit` of a Keras model in a trial of a sweep, or in a run that is recorded: its epochs' logs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from stratagem.figures import trial_record
from stratagem.figures.recorder import epoch_event


class TrialCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes a line an epoch; it looks at logs alone, so no replica need wait for it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        trial_record.record_epoch(epoch, logs or {})
        epoch_event(epoch, logs or {})


def recorded(
    fit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `fit` with one callback more."""
    given = inspect.signature(fit).bind(*args, **kwargs)
    callbacks = given.arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(TrialCallback())
    else:
        each = keras.tree.flatten(callbacks) if callbacks is not None else []
        given.arguments["callbacks"] = [*each, TrialCallback()]
    return given.args, given.kwargs
