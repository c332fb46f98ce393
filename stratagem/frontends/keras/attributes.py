"""Attributes of a model, its layers and its optimizer, which callbacks may change.

Plain ones can be followed elsewhere. Functions cannot: that one was replaced can only be noticed.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from torch import Tensor
from torch.nn import Module, Parameter

from stratagem.errors import UsageError

Change = tuple[int, str, Any]
_PLAIN = (int, float, bool, str, type(None), np.generic, Tensor)
#: what Keras and torch set by themselves, on every replica in its own time
_THEIR_OWN = frozenset({"training", "built"})


class Attributes:
    """Sees which plain attributes have changed since the last look, and which functions at all."""

    def __init__(self, model: Any) -> None:
        self._objects = _objects(model)
        self._seen = self._look()
        self._functions = self._callables()

    def changed(self) -> list[Change]:
        """What differs from the last look, as (object, name, value); a new look is taken."""
        before, self._seen = self._seen, self._look()
        return [
            (i, name, self._value(i, name))
            for i, (old, new) in enumerate(zip(before, self._seen, strict=True))
            for name, mark in new.items() if name not in old or old[name] != mark
        ]  # fmt: skip

    def replaced(self) -> str | None:
        """A function of a layer that is another now, by its name; None if all are the same."""
        now = self._callables()
        for (i, name), value in self._functions.items():
            if now.get((i, name), value) is not value:
                return f"{self._objects[i].name}.{name}"
        return None

    def refuse_replaced(self) -> None:
        """While the model trains."""
        if name := self.replaced():
            raise UsageError(
                f"{name} was replaced while the model trains, which the other replicas cannot "
                "follow; replace it between two calls of fit, or have the layer look at a number "
                "that the callback changes."
            )

    def everything(self) -> list[Change]:
        """All of them, for a copy that was made earlier."""
        return [
            (i, name, self._value(i, name)) for i, each in enumerate(self._seen) for name in each
        ]

    def _value(self, index: int, name: str) -> Any:
        value = self._objects[index].__dict__[name]
        if isinstance(value, Tensor):
            return value.detach()
        return value.item() if isinstance(value, np.generic) else value

    def _callables(self) -> dict[tuple[int, str], Any]:
        """Activations, for example; a model's own attributes Keras changes itself."""
        return {
            (i, name): value
            for i, obj in enumerate(self._objects)
            if isinstance(obj, keras.Layer) and not isinstance(obj, keras.Model)
            for name, value in obj.__dict__.items()
            if callable(value) and not isinstance(value, Module)
        }

    def _look(self) -> list[dict[str, Any]]:
        return [
            {name: (id(value), value._version) if type(value) is Tensor else value
             for name, value in obj.__dict__.items()
             if isinstance(value, _PLAIN) and not isinstance(value, Parameter)
             and name not in _THEIR_OWN}
            for obj in self._objects
        ]  # fmt: skip


def follow(model: Any, changes: list[Change]) -> None:
    """Make the same changes to a copy."""
    objects = _objects(model)
    for index, name, value in changes:
        objects[index].__dict__[name] = value


def _objects(model: Any) -> list[Any]:
    optimizer = model.optimizer
    others = [optimizer, getattr(optimizer, "inner_optimizer", None)]
    others += [each for each in keras.tree.flatten(model.loss) if hasattr(each, "__dict__")]
    return [*model._flatten_layers(), *(each for each in others if each is not None)]
