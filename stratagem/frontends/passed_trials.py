"""Trials of rows that a model has passed, so that not every later call makes them again.

A call looks at what is tried first: its objects, their attributes and the kind of the rows. Where
that is as it was, the trial is made at the 1st, 2nd, 4th, 8th, ... call only; anything else begins
anew. What cannot be seen (weights that have been trained meanwhile, a global that a forward pass
reads) is the reason for doing it again at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor

from stratagem.compat.torch_names import pytree
from stratagem.state.change_tracker import snapshot, version_of

#: attributes of a module with what training writes to
_TRAINED = frozenset({"_parameters", "_buffers", "_modules"})


class PassedTrials:
    """Of one compiled model, in this process."""

    def __init__(self) -> None:
        self._passed: dict[str, tuple[Any, int]] = {}

    def __reduce__(self) -> Any:
        return PassedTrials, ()  # a copy elsewhere has passed nothing

    def unless_passed(self, name: str, look: Any, trial: Callable[[], object]) -> None:
        """Make the trial, unless it was passed by what looked alike; one that raises was not."""
        before, calls = self._passed.pop(name, (None, 0))
        calls = calls + 1 if before == look else 1
        if calls & (calls - 1) == 0:
            trial()
        self._passed[name] = look, calls


class _Same:
    """Equal to what holds the very same object, which it keeps: its place is not given again."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def look_at(
    objects: Iterable[Any], compute: str = "forward", but: Collection[str] = ()
) -> list[Any]:
    """What tells later whether these are as they are now: which they are, the method of their class
    that computes, and their attributes `but` some."""
    return [
        (_Same(each), getattr(type(each), compute, None), _attributes(each, but))
        for each in objects
    ]


def _attributes(owner: Any, but: Collection[str]) -> dict[str, Any]:
    return {
        name: snapshot(value, _Same if name in _TRAINED else _inside)
        for name, value in getattr(owner, "__dict__", {}).items()
        if name not in but
    }


def _inside(value: Any) -> Any:
    """Of an object: which one, and its attributes; of a tensor also how often it was written to."""
    if isinstance(value, Tensor):
        return _Same(value), version_of(value)
    known = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return _Same(value), {name: snapshot(each, _Same) for name, each in known.items()}


def kinds_of(batch: Any) -> list[Any]:
    """The structure of a batch, and what its tensors are but for their values."""
    leaves, structure = pytree.tree_flatten(batch)
    return [
        structure,
        [
            (each.dtype, each.device, each.shape) if isinstance(each, Tensor) else type(each)
            for each in leaves
        ],
    ]
