"""Trials of rows that a model has passed, so that not every later call makes them again.

A call looks at what is tried first: its objects, their attributes and classes, and the kind of the
rows. Where that is as it was, the trial is made at the 1st, 2nd, 4th, 8th, ... call only; anything
else begins anew. What is not seen (values of trained weights, of statistics and of rows, a global
that a forward pass reads) is the reason for doing it again at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from stratagem.compat.torch_names import pytree
from stratagem.state.change_tracker import snapshot, version_of

log = logging.getLogger("stratagem")
#: attributes of a module with what training writes to
_TRAINED = frozenset({"_parameters", "_buffers", "_modules"})
_LIBRARIES = frozenset({"torch", "keras", "builtins", "functools", "collections", "stratagem"})


class PassedTrials:
    """Of one compiled model, in this process."""

    def __init__(self) -> None:
        self._passed: dict[str, tuple[Any, int]] = {}

    def __reduce__(self) -> Any:
        return PassedTrials, ()  # a copy elsewhere has passed nothing

    def unless_passed(
        self, name: str, look: Callable[[], Any], trial: Callable[[], object]
    ) -> None:
        """Make the trial, unless it was passed by what looked alike; one that raises was not."""
        before, calls = self._passed.pop(name, (None, 0))
        try:
            now = look()
            calls = calls + 1 if before == now else 1
        except Exception as error:  # say, a list that has itself inside
            log.debug("rows are tried at each call: %s: %s", type(error).__name__, error)
            trial()
            return
        if calls & (calls - 1) == 0:
            trial()
        self._passed[name] = now, calls


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
    that computes, their attributes `but` some, and those of classes that are not a library's."""
    look = _Look()
    return [
        (
            _Same(each),
            getattr(type(each), compute, None),
            {
                name: snapshot(value, _held if name in _TRAINED else look.inside)
                for name, value in getattr(each, "__dict__", {}).items()
                if name not in but
            },
            look.of_class(type(each)),
        )
        for each in objects
    ]


def _held(value: Any) -> Any:
    """Of what a module holds: which it is; where training does not write to it, or where it is one
    number, also what is in it."""
    if isinstance(value, Parameter):
        return _Same(value), None if value.requires_grad else version_of(value)
    one = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    return _Same(value), float(value) if one else None


class _Look:
    """Goes into objects, into each once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def inside(self, value: Any) -> Any:
        """Of an object: which one, and its attributes; of a tensor also how often it was written
        to. Of modules and of a library's objects the attributes are not gone into."""
        if isinstance(value, Tensor):
            return _Same(value), version_of(value)
        if isinstance(value, type) or id(value) in self._seen:
            return _Same(value)
        self._seen.add(id(value))
        stops = isinstance(value, Module) or _is_of_library(type(value))
        known = getattr(value, "__dict__", {})
        return _Same(value), {
            name: snapshot(each, _Same if stops else self.inside) for name, each in known.items()
        }

    def of_class(self, kind: type) -> list[Any]:
        if id(kind) in self._seen:
            return []
        self._seen.add(id(kind))
        own = [each for each in kind.__mro__ if not _is_of_library(each)]
        return [[(name, snapshot(v, _Same)) for name, v in vars(each).items()] for each in own]


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


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
