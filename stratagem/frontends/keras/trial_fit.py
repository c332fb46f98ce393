"""`fit` of a Keras model in a trial of a sweep: a line of metrics an epoch, in its folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from stratagem.figures import trial_record


class TrialCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes a line an epoch; it looks at logs alone, so no replica need wait for it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        trial_record.record_epoch(epoch, logs or {})


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
