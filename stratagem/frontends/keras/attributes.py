"""Plain attributes of a model, its layers, its loss and its optimizer, which callbacks may change.

Functions cannot be followed elsewhere: that one was replaced can only be noticed.
"""

from __future__ import annotations

from typing import Any

import keras
from torch.nn import Module

from stratagem.errors import UsageError
from stratagem.state.change_tracker import AttributeTracker, Change

#: what Keras and torch set by themselves, on every replica in its own time
_THEIR_OWN = frozenset({"training", "built"})


class Attributes(AttributeTracker):
    """Sees which plain attributes have changed since the last look, and which functions at all."""

    def __init__(self, model: Any) -> None:
        super().__init__(objects(model), _THEIR_OWN)
        self._functions = self._callables()

    def changed(self) -> list[Change]:
        """What differs from the last look; a new look is taken."""
        if found := self.changes():
            self.mark()
        return found

    def replaced(self) -> str | None:
        """A function of a layer that is another now, by its name; None if all are the same."""
        now = self._callables()
        for (i, name), value in self._functions.items():
            if now.get((i, name), value) is not value:
                return f"{self.objects[i].name}.{name}"
        return None

    def refuse_replaced(self) -> None:
        """While the model trains."""
        if name := self.replaced():
            raise UsageError(
                f"{name} was replaced while the model trains, which the other replicas cannot "
                "follow; replace it between two calls of fit, or have the layer look at a number "
                "that the callback changes."
            )

    def _callables(self) -> dict[tuple[int, str], Any]:
        """Activations, for example; a model's own attributes Keras changes itself."""
        return {
            (i, name): value
            for i, obj in enumerate(self.objects)
            if isinstance(obj, keras.Layer) and not isinstance(obj, keras.Model)
            for name, value in obj.__dict__.items()
            if callable(value) and not isinstance(value, Module)
        }


def objects(model: Any) -> list[Any]:
    """What has such attributes, in the same order on every replica."""
    optimizer = model.optimizer
    others = [optimizer, getattr(optimizer, "inner_optimizer", None)]
    others += [each for each in keras.tree.flatten(model.loss) if hasattr(each, "__dict__")]
    return [*model._flatten_layers(), *(each for each in others if each is not None)]
