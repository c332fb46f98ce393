"""Plain attributes of a model, its layers and its optimizer, which callbacks may change."""

from __future__ import annotations

from typing import Any

Change = tuple[int, str, Any]
_PLAIN = (int, float, bool, str, type(None))
#: what Keras and torch set by themselves, on every replica in its own time
_THEIR_OWN = frozenset({"training", "built"})


class Attributes:
    """Sees which plain attributes have changed since the last look."""

    def __init__(self, model: Any) -> None:
        self._objects = _objects(model)
        self._seen = self._look()

    def changed(self) -> list[Change]:
        """What differs from the last look, as (object, name, value); a new look is taken."""
        before, self._seen = self._seen, self._look()
        return [
            (i, name, value)
            for i, (old, new) in enumerate(zip(before, self._seen, strict=True))
            for name, value in new.items() if name not in old or old[name] != value
        ]  # fmt: skip

    def _look(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in obj.__dict__.items()
             if type(value) in _PLAIN and name not in _THEIR_OWN}
            for obj in self._objects
        ]  # fmt: skip


def follow(model: Any, changes: list[Change]) -> None:
    """Make the same changes to a copy."""
    objects = _objects(model)
    for index, name, value in changes:
        objects[index].__dict__[name] = value


def _objects(model: Any) -> list[Any]:
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    return [*model._flatten_layers(), *(each for each in (optimizer, inner) if each is not None)]
