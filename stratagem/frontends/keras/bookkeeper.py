"""The servers' books in Keras' history."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from stratagem.frontends.books import Books, enter
from stratagem.rules.stats import Stats


class Bookkeeper(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes what the servers have counted into Keras' history; logs stay what metrics say."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        super().__init__()
        self._stats, self._books = stats, Books()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        counted, details = self._books.turn(self._stats())
        found = {**counted, **details}
        taken = set(logs or {})  # a metric of the user's has that name
        enter(self.model.history.history, {k: v for k, v in found.items() if k not in taken})


def with_bookkeeper(
    own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    stats: Callable[[], Stats | None],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The arguments of `fit` with one callback more."""
    given = inspect.signature(own).bind(*args, **kwargs)
    callbacks = given.arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return args, kwargs  # the user's own, with a history of the user's own
    each = keras.tree.flatten(callbacks) if callbacks is not None else []
    given.arguments["callbacks"] = [*each, Bookkeeper(stats)]
    return given.args, given.kwargs
