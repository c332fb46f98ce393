"""Everything but tensors that decides what a Keras model's training step does, as plain values.

Two steps of equal settings have the same operators, if all code in them is Keras' own; whatever is
not, or cannot be described, is named.
"""

from __future__ import annotations

import enum
import types
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor

from stratagem.compat.keras_names import BOOKKEEPING
from stratagem.compat.torch_names import MODULE_HOOKS, has_global_hooks
from stratagem.state.change_tracker import MODULE_ATTRIBUTES, PLAIN, snapshot

_VALUES = frozenset({complex, bytes, type(...)})
_NAMED = (type, types.ModuleType, enum.Enum, torch.dtype, torch.device, np.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc)
#: bookkeeping, or what never takes part in a step
_UNHEARD = (keras.KerasTensor, keras.Initializer, keras.Optimizer)
#: of attributes: torch's own, bookkeeping of Keras, and what a step itself writes
_BESIDE = MODULE_ATTRIBUTES | BOOKKEEPING
_LARGE = 1 << 16


class StepSettings:
    """What a walk through a model has found. `foreign`: the first part that is not Keras' own."""

    def __init__(self, model: Any) -> None:
        self.foreign: str | None = None
        #: every variable that a part holds, the model's own or not
        self.variables: dict[int, Any] = {}
        self._known: dict[int, int] = {}
        optimizer = model.optimizer
        layers = list(model._flatten_layers())
        graphs = [getattr(each, "_functional", each) for each in layers]
        operations = [each for graph in graphs for each in getattr(graph, "operations", ())]
        self.value: Any = (
            keras.config.epsilon(),
            keras.config.floatx(),
            keras.config.image_data_format(),
            torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
            has_global_hooks() or any(vars(e).get(kind) for e in layers for kind in MODULE_HOOKS),
            (id(optimizer), type(optimizer), getattr(optimizer, "loss_scale_factor", None)),
            self._of(vars(optimizer).get("scale_loss") if optimizer is not None else None),
            *(self._of(each) for each in layers),
            *(self._of(each) for each in operations),
            *(self._called_with(each) for each in operations),
        )
        if optimizer is not None:
            self._ask(type(optimizer), optimizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepSettings) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]

    def _called_with(self, operation: Any) -> Any:
        """What a layer or an operation of a functional model is given beside tensors."""
        given = [node.arguments for node in operation._inbound_nodes]
        return tuple(self._of((each.args, each.kwargs)) for each in given)

    def _of(self, value: Any) -> Any:
        return snapshot(value, self._single)

    def _single(self, value: Any) -> Any:
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        if isinstance(value, _UNHEARD):
            return None
        if id(value) in self._known:
            return "again", self._known[id(value)]
        self._known[id(value)] = len(self._known)
        if isinstance(value, keras.Variable):
            self.variables[id(value)] = value
            at = value.value
            return id(value), id(at), value.trainable, self._of(value.regularizer)
        if isinstance(value, slice):
            return kind, *map(self._of, (value.start, value.stop, value.step))
        if isinstance(value, _NAMED):
            return value
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes < _LARGE:
            return kind, value.shape, value.dtype, value.tobytes()
        if isinstance(value, Tensor):
            return id(value), value._version
        if isinstance(value, partial):
            return kind, self._of((value.func, value.args, value.keywords))
        if isinstance(value, _FUNCTIONS):
            self._ask(value, value)
            return getattr(value, "__func__", value), id(getattr(value, "__self__", None))
        if not self._ask(kind, value) or kind.__module__.startswith("stratagem."):
            return kind
        plain, of = PLAIN, self._of
        return kind, *[
            (name, type(each), each) if type(each) in plain else (name, of(each))  # 1 is not True
            for name, each in vars(value).items()
            if name not in _BESIDE
        ]

    def _ask(self, made: Any, value: Any) -> bool:
        """Whether it is Keras' own; `Lambda` and the like hold code of the user's."""
        home = str(getattr(made, "__module__", None))
        wraps = made in (keras.layers.Lambda, keras.layers.TorchModuleWrapper)
        own = home.startswith(("keras.", "stratagem.")) and not wraps and hasattr(made, "__dict__")
        if not own:
            self.foreign = self.foreign or str(getattr(value, "name", value))
        return own
