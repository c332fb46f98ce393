"""Pickles a Keras model for the processes that a strategy has started, as a graph of objects.

Keras pickles a model by saving and loading it, which fails for classes of `__main__` and for
subclassed models without a config. Here every object is sent with its attributes, and Keras' tables
with identities as keys (variables of an optimizer, tracked objects) are made again on arrival.
"""

from __future__ import annotations

import importlib
import itertools
import weakref
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

import keras
import torch

from stratagem.compat.keras_names import (
    COLLECTIONS,
    OPTIMIZER,
    SAVEABLE,
    DynamicBackend,
    Functional,
    Tracker,
    inject_functional_model_class,
)
from stratagem.replicas import graph_pickle
from stratagem.training.settings import Settings

#: attributes that are not sent: the driver's, and what Keras makes again on demand
_LEFT_BEHIND = frozenset(
    {
        "train_function",
        "test_function",
        "predict_function",
        "_eval_epoch_iterator",
        "_parallel_update_step",
        "update_state",
    }
)


def reduce_keras(obj: Any) -> Any:
    """Reduce a Keras object; returns NotImplemented for any other."""
    kind = type(obj)
    if isinstance(obj, Functional):
        return _blank_functional, (kind,), _attributes(obj), None, None, _fill
    if isinstance(obj, SAVEABLE):
        return _blank, (kind,), _attributes(obj), None, None, _fill
    if kind in COLLECTIONS:
        return _blank, (kind,), (_contents(obj), dict(obj.__dict__)), None, None, _fill_collection
    if kind is Tracker:
        return _blank, (kind,), dict(obj.__dict__), None, None, _fill
    if kind is DynamicBackend:
        return kind, (obj._backend,)
    if isinstance(obj, keras.Variable):
        return _blank, (kind,), dict(obj.__dict__), None, None, _fill
    if kind is FunctionType and _is_inner(obj):
        made = (obj.__globals__["__name__"], obj.__code__, len(obj.__closure__ or ()))
        return _inner, made, _inner_state(obj), None, None, _fill_inner
    return NotImplemented


def _is_inner(function: FunctionType) -> bool:
    """Whether a function is a closure of Keras' own, of which each layer has some.

    cloudpickle would search all modules for what each of them may need.
    """
    module = function.__globals__.get("__name__") or ""
    return module.partition(".")[0] == "keras" and not graph_pickle.is_found(function)


def _inner(module: str, code: CodeType, cells: int) -> FunctionType:
    there = vars(importlib.import_module(module))
    return FunctionType(code, there, closure=tuple(CellType() for _ in range(cells)))


_SLOTS = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")


def _inner_state(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any], dict[int, Any]]:
    """Return a closure's attributes, and the contents of its cells that are not empty."""
    cells = enumerate(function.__closure__ or ())
    held = {i: cell.cell_contents for i, cell in cells if cell != CellType()}
    return {name: getattr(function, name) for name in _SLOTS}, dict(vars(function)), held


def _fill_inner(
    function: FunctionType, state: tuple[dict[str, Any], dict[str, Any], dict[int, Any]]
) -> None:
    slots, attributes, held = state
    for name, value in slots.items():
        setattr(function, name, value)
    vars(function).update(attributes)
    for i, value in held.items():
        (function.__closure__ or ())[i].cell_contents = value


graph_pickle.register(reduce_keras)


def copied(model: Any) -> Any:
    """Copy a model in this process; the copy shares nothing with it."""
    data, segments = graph_pickle.dumps(model)
    copy = graph_pickle.loads(data)
    segments.clear()
    settle(copy)
    return copy


def _attributes(obj: Any) -> dict[str, Any]:
    """Return an object's attributes without the methods of a driver."""
    kept = {key: value for key, value in obj.__dict__.items() if key not in _LEFT_BEHIND}
    overlaid = kept.pop("_stratagem", None)
    for name in getattr(overlaid, "overlaid", ()):
        kept.pop(name, None)
    return kept


def _blank(kind: Any) -> Any:
    if issubclass(kind, list | dict | set):
        return kind.__base__.__new__(kind)
    return object.__new__(kind)


def _blank_functional(kind: Any) -> Any:
    """Make an empty functional model. Keras changes the bases of a subclass with its first model,
    which this process may not have made yet."""
    if not issubclass(kind, Functional):
        inject_functional_model_class(kind)
    return _blank(kind)


def _fill(obj: Any, attributes: dict[str, Any]) -> None:
    obj.__dict__.update(attributes)
    if isinstance(obj, keras.Model):
        obj.__dict__.update(train_function=None, test_function=None, predict_function=None)


def _contents(obj: Any) -> list[Any]:
    return list(obj.items()) if isinstance(obj, dict) else list(obj)


def _fill_collection(obj: Any, state: tuple[list[Any], dict[str, Any]]) -> None:
    contents, attributes = state
    obj.__dict__.update(attributes)
    if isinstance(obj, list):
        list.extend(obj, contents)
    elif isinstance(obj, dict):
        dict.update(obj, contents)
    else:
        set.update(obj, contents)


def settle(model: Any) -> None:
    """Make Keras' tables with identities as keys again, in another process."""
    for obj in _reachable(model):
        if isinstance(obj, Tracker):
            obj.stored_ids = {
                name: {id(value) for value in store} for name, (_, store) in obj.config.items()
            }
        elif obj.built:
            variables = obj._trainable_variables
            obj._trainable_variables_indices = {id(v): i for i, v in enumerate(variables)}


def optimizers(model: Any) -> list[Any]:
    """Return all optimizers of a model, inner ones too, in a fixed order."""
    return [obj for obj in _reachable(model) if isinstance(obj, OPTIMIZER)]


def _reachable(root: Any) -> list[Any]:
    """Return the trackers and optimizers of all Keras objects that a model refers to."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        obj = waiting.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, Tracker | OPTIMIZER):
            found.append(obj)
        if isinstance(obj, Tracker):
            continue
        if isinstance(obj, list | tuple | set):
            waiting.extend(obj)
        elif isinstance(obj, dict):
            waiting.extend(obj.values())
        elif isinstance(obj, SAVEABLE | torch.nn.Module):
            waiting.extend(obj.__dict__.values())
    return found


# --- what is sent ---------------------------------------------------------------------------------

#: settings of `keras.config`, which layers read when they are made
_SETTINGS = ("floatx", "epsilon", "image_data_format", "dtype_policy")
_numbers = itertools.count()
#: numbers of deleted models, for followers to forget
_gone: list[int] = []


def number_of(model: Any) -> int:
    """Number a new model; followers forget the number when the model is deleted."""
    number = next(_numbers)
    weakref.finalize(model, _gone.append, number)
    return number


def _config() -> dict[str, Any]:
    return {name: getattr(keras.config, name)() for name in _SETTINGS}


@dataclass
class FollowerModel:
    """A model as a follower gets it; `model` is None if an earlier call has sent it."""

    number: int
    model: Any
    settings: Settings
    #: the class of the follower's verbs
    steps: Any = None
    config: dict[str, Any] = field(default_factory=_config)
    gone: list[int] = field(default_factory=lambda: list(_gone))

    def unpacked(self) -> Any:
        """As a follower: return the model, and take over the sender's settings of Keras."""
        for name, value in self.config.items():
            getattr(keras.config, f"set_{name}")(value)
        settle(self.model)
        return self.model
