"""The state of callbacks as plain values, which other instances of their classes can load.

A callback with `state_dict` and `load_state_dict` is saved by these. Of any other callback the
plain attributes are saved: numbers, strings, bools, None, tensors, arrays, and lists, tuples and
dicts of them. Attributes that have the two methods (a torch scheduler, an averaged model) are saved
by these, except the module and optimizer in training, which a checkpoint saves itself.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import UsageError
from stratagem.frontends.callbacks import Callback, Progress

log = logging.getLogger("stratagem")

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FIRST = "_stratagem_first"
_GIVEN = ("model", "params", _FIRST)
_NOT_PLAIN = object()
_ARRAY = "numpy.ndarray"  # the key of a dict that stands for an array


class CallbackStates:
    """The state that callbacks have gained since the training began.

    Constructor arguments are not saved: after a restart with `EarlyStopping(patience=5)` the
    patience is 5, whatever it was before.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = [each for each in callbacks if not isinstance(each, Progress)]
        self._begun = [_state(each) for each in self._callbacks]
        #: their state before their first training in this process
        self._first = [
            vars(each).setdefault(_FIRST, begun)
            for each, begun in zip(self._callbacks, self._begun, strict=True)
        ]

    def saved(self) -> list[dict[str, Any]]:
        """Return the state of each callback, by its class."""
        return list(map(_gained, self._callbacks, self._begun))

    def by_number(self, which: Sequence[Callback] | None = None) -> dict[int, dict[str, Any]]:
        """Return the state of some callbacks, or of all, by index.

        Earlier trainings of this process are included, since another process has not seen them.
        """
        return {
            number: _gained(each, first)
            for number, (each, first) in enumerate(zip(self._callbacks, self._first, strict=True))
            if which is None or each in which
        }

    def reset(self) -> None:
        """Put the callbacks back to their state when the training began."""
        for callback, begun in zip(self._callbacks, self._begun, strict=True):
            _reset(callback, begun)

    def load(self, saved: Sequence[dict[str, Any]]) -> None:
        """Load the saved states by class: the n-th callback of a class gets its n-th state."""
        left = list(saved)
        for callback, begun in zip(self._callbacks, self._begun, strict=True):
            kind = type(callback).__name__
            found = next((i for i, each in enumerate(left) if each["kind"] == kind), None)
            if found is None:
                log.warning("the checkpoint knows of no callback %s; it begins anew", kind)
            else:
                _reset(callback, begun)
                _load(callback, left.pop(found)["state"])
        for each in left:
            log.warning("the checkpoint has a state of %s, which is not here", each["kind"])


def _gained(callback: Callback, begun: dict[str, Any]) -> dict[str, Any]:
    state = {k: v for k, v in _state(callback).items() if not _equal(begun.get(k), v)}
    return {"kind": type(callback).__name__, "state": state}


def _reset(callback: Callback, begun: dict[str, Any]) -> None:
    for name in _state(callback).keys() - begun.keys() - {"own"}:
        delattr(callback, name)
    _load(callback, copy.deepcopy(begun))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _has_own(obj: Any) -> bool:
    return not isinstance(obj, type) and all(
        callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _is_trained(value: Any, model: Any) -> bool:
    """Return whether a value is in training: the optimizer, or a module with common parts."""
    root = getattr(model, "module", None)
    if isinstance(value, nn.Module) and isinstance(root, nn.Module):
        return root in value.modules() or value in root.modules()
    return isinstance(value, Optimizer) and value is getattr(model, "optimizer", None)


def _state(obj: Any) -> dict[str, Any]:
    if _has_own(obj):
        return {"own": _plain_parts(obj)}
    model = getattr(obj, "model", None)
    found = {
        name: _member(value)
        for name, value in vars(obj).items()
        if name not in _GIVEN and not _is_trained(value, model)
    }
    return {name: value for name, value in found.items() if value is not _NOT_PLAIN}


def _plain_parts(obj: Any) -> dict[str, Any]:
    own: Mapping[str, Any] = obj.state_dict()
    found = {name: _copied(value) for name, value in own.items()}
    lost = [name for name, value in found.items() if value is _NOT_PLAIN]
    if lost and isinstance(obj, Callback):
        raise UsageError(
            f"{type(obj).__name__}.state_dict() has {lost[0]!r}, a {type(own[lost[0]]).__name__}, "
            "which cannot be saved; return numbers, text, tensors, arrays, and lists, tuples or "
            "dicts of them."
        )
    return {name: value for name, value in found.items() if value is not _NOT_PLAIN}


def _member(value: Any) -> Any:
    if _has_own(value) or _is_ours(value):
        return {"of": _state(value)}
    copied = _copied(value)
    return _NOT_PLAIN if copied is _NOT_PLAIN else {"is": copied}


def _is_ours(value: Any) -> bool:
    """Return whether a value is a helper object of a built-in callback."""
    kind = type(value)
    return kind.__module__ == Callback.__module__ and not isinstance(value, Callback | type)


def _load(obj: Any, state: dict[str, Any]) -> None:
    if "own" in state:
        obj.load_state_dict(_restored(copy.deepcopy(state["own"])))
        return
    for name, value in state.items():
        if "is" in value:
            setattr(obj, name, _restored(value["is"]))
        elif hasattr(obj, name):
            _load(getattr(obj, name), value["of"])


def _copied(value: Any) -> Any:
    """Return a copy of a plain value; `_NOT_PLAIN` for anything else."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, dict):
        parts = {key: _copied(each) for key, each in value.items() if type(key) in _PLAIN}
        whole = len(parts) == len(value) and _NOT_PLAIN not in _identities(parts.values())
        return parts if whole else _NOT_PLAIN
    if type(value) in (list, tuple):
        inside = [_copied(each) for each in value]
        return _NOT_PLAIN if _NOT_PLAIN in _identities(inside) else type(value)(inside)
    return _NOT_PLAIN


def _restored(value: Any) -> Any:
    """Return the value that `_copied` was given."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _restored(each) for key, each in value.items()}
    return type(value)(map(_restored, value)) if type(value) in (list, tuple) else value


def _identities(values: Any) -> list[Any]:
    """Replace tensors by None, since `in` would compare them element by element."""
    return [None if isinstance(each, Tensor) else each for each in values]
