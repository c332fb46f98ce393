"""A Keras model for our own children, as the graph of objects that it is.

Keras pickles a model by saving and loading it, which fails for classes of `__main__` and for
subclassed models without a config. Here every object travels with its attributes, and what Keras
keys by identity (variables of an optimizer, tracked objects) is keyed anew on arrival.
"""

from __future__ import annotations

from typing import Any

import keras
import torch
from keras.src.utils import backend_utils, tracking

from stratagem.replicas import graph_pickle

#: attributes of a model that are the conductor's, or are made again on demand
_LEFT_BEHIND = frozenset({
    "train_function", "test_function", "predict_function", "_eval_epoch_iterator", "_torch_params",
    "_parallel_update_step", "update_state",
})  # fmt: skip
_SAVEABLE: Any = next(c for c in keras.Model.__mro__ if c.__name__ == "KerasSaveable")
_OPTIMIZER: Any = next(c for c in keras.Optimizer.__mro__ if c.__name__ == "BaseOptimizer")
_COLLECTIONS = tuple(kind for name, kind in vars(tracking).items() if name.startswith("Tracked"))


def reduce_keras(obj: Any) -> Any:
    """How a Keras object is pickled; NotImplemented for anything else."""
    kind = type(obj)
    if isinstance(obj, _SAVEABLE):
        return _blank, (kind,), _attributes(obj), None, None, _fill
    if kind in _COLLECTIONS:
        return _blank, (kind,), (_contents(obj), dict(obj.__dict__)), None, None, _fill_collection
    if kind is tracking.Tracker:
        return _blank, (kind,), dict(obj.__dict__), None, None, _fill
    if kind is backend_utils.DynamicBackend:
        return kind, (obj._backend,)
    if isinstance(obj, keras.Variable):
        return _blank, (kind,), dict(obj.__dict__), None, None, _fill
    return NotImplemented


graph_pickle.register(reduce_keras)


def copied(model: Any) -> Any:
    """Another one like it, that shares nothing with it, in this process."""
    data, segments = graph_pickle.dumps(model)
    copy = graph_pickle.loads(data)
    segments.clear()
    settle(copy)
    return copy


def _attributes(obj: Any) -> dict[str, Any]:
    """Its own attributes without what a conductor laid over its methods."""
    kept = {key: value for key, value in obj.__dict__.items() if key not in _LEFT_BEHIND}
    overlaid = kept.pop("_stratagem", None)
    for name in getattr(overlaid, "overlaid", ()):
        kept.pop(name, None)
    modules = kept.get("_modules")
    if modules and "_torch_params" in modules:
        kept["_modules"] = {k: v for k, v in modules.items() if k != "_torch_params"}
    return kept


def _blank(kind: Any) -> Any:
    if issubclass(kind, list | dict | set):
        return kind.__base__.__new__(kind)
    return object.__new__(kind)


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
    """Key anew by identity what was keyed by the identities of another process."""
    for obj in _reachable(model):
        if isinstance(obj, tracking.Tracker):
            obj.stored_ids = {
                name: {id(value) for value in store} for name, (_, store) in obj.config.items()
            }
        elif obj.built:
            variables = obj._trainable_variables
            obj._trainable_variables_indices = {id(v): i for i, v in enumerate(variables)}


def optimizers(model: Any) -> list[Any]:
    """Every optimizer that hangs on the model, one inside of another too; in a fixed order."""
    return [obj for obj in _reachable(model) if isinstance(obj, _OPTIMIZER)]


def _reachable(root: Any) -> list[Any]:
    """The trackers and optimizers of every Keras object that hangs on the model."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        obj = waiting.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, tracking.Tracker | _OPTIMIZER):
            found.append(obj)
        if isinstance(obj, tracking.Tracker):
            continue
        if isinstance(obj, list | tuple | set):
            waiting.extend(obj)
        elif isinstance(obj, dict):
            waiting.extend(obj.values())
        elif isinstance(obj, _SAVEABLE | torch.nn.Module):
            waiting.extend(obj.__dict__.values())
    return found
