"""A training step of Keras' own layers, losses and metrics, traced once and run without Python.

After `AFTER` steps on batches of one shape, `train_step` is traced into one graph of operators:

    weights, states, batch  ->  gradients, new states, logs

The graph replaces the step once it has given the same, bit for bit, as the step itself on one
batch. Its gradients go through backward, where the hooks of an all-reduce, of servers or of the
user receive them; the optimizer makes the update.

A step is not captured where it runs code that is not Keras' own, draws random numbers, chooses
operators by values or computes in another type than float32, nor while callbacks of the user act
between steps. All graphs are dropped when the `StepSettings` of the model have changed.
"""

from __future__ import annotations

import enum
import logging
import time
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor

from stratagem.compat.keras_names import BOOKKEEPING
from stratagem.compat.torch_names import MODULE_HOOKS, has_global_hooks
from stratagem.frontends.keras.image_layout import all_keras, without_copies
from stratagem.frontends.keras.quiet_loop import following, logs_are_unread
from stratagem.frontends.keras.step_graph import StepGraph
from stratagem.frontends.keras.step_logs import has_own
from stratagem.frontends.keras.step_loop import PlannedUpdate, StepLoop
from stratagem.state.change_tracker import MODULE_ATTRIBUTES, PLAIN, snapshot
from stratagem.wire.device_kinds import gpu_in_use

log = logging.getLogger("stratagem")

#: how many steps on batches of one shape precede the trace; how many shapes are traced at most
AFTER, SHAPES = 16, 8
#: a step of so many seconds is not captured: a few milliseconds of Python do not matter in it
LONG_STEP = 0.05
#: several steps run at once as long as Keras would take this many seconds: Ctrl-C waits for them
AT_ONCE = 0.4
#: layers with loops in Python, whose graphs would be long
_LONG = (keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed)


class CapturedStep:
    """The training step of one copy of a model: Keras' own, or a graph of it.

    `stale`: the model may have been changed, so its settings are compared before the next step;
    `between_steps`: it may be changed before every step, so no step is captured.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.stale, self.between_steps = model, True, False
        #: whether a call runs in which this process trains alone
        self.is_open = False
        self._settings: StepSettings | None = None
        #: by shape and share of the batch: how long each step took, and the graph; None: no graph
        self._seen: dict[Hashable, list[float]] = {}
        self._graphs: dict[Hashable, StepGraph | None] = {}
        self._why: str | None = None
        self._update: PlannedUpdate | None = None
        #: batches whose steps have run together with an earlier batch's, the next one last
        self._made: list[Any] = []
        self._unread: dict[str, Any] = {}
        #: whether images stay channels last; None: not known
        self._channels_last: bool | None = None

    @contextmanager
    def during(self, *, between_steps: bool) -> Iterator[None]:
        """Wrap a call of the user's, which may be inside of another."""
        before = self.is_open, self.between_steps
        self.stale, self.is_open, self.between_steps = True, True, before[1] or between_steps
        self._channels_last = None
        try:
            yield
        finally:
            self.is_open, self.between_steps = before

    def __call__(self, data: Any, share: Hashable = None) -> Any:
        """Make the step on these rows, which are this `share` of a batch; returns its logs.

        In this order: nothing, if the step has run together with an earlier one; Keras' own step,
        if callbacks act between steps; the graph of this shape, with the batches that follow if
        possible; Keras' own step, which is timed; and after `AFTER` of these, the trace.
        """
        if self._made and self._made[-1] is data:  # another call's batches may come in between
            self._made.pop()
            logs_are_unread(self._model)
            return self._unread
        if self.between_steps:
            self.stale = True  # comparing the settings before each step takes too long
            return self._own()(data)
        if self.stale and self._compare_settings():
            self._seen = {}
        tensors: list[Tensor] = []
        shape = None if self._why else _shape(data, tensors)
        key = (shape, share)
        graph = self._graphs.get(key)
        if graph is not None:
            if logs_are_unread(self._model) and self._run_several(graph, data, tensors, shape):
                return self._unread
            logs = graph.run(tensors, self._update)
            return self._own()(data) if logs is None else logs  # Keras' own error is clear
        own = self._own()
        if shape is None or key in self._graphs:
            return own(data)
        seen = self._seen.setdefault(key, [])
        if len(self._graphs) == SHAPES or (len(seen) >= AFTER and min(seen) > LONG_STEP):
            return own(data)
        if len(seen) >= AFTER:
            return self._capture(key, own, data, tensors)
        begun = time.perf_counter()
        logs = own(data)
        seen.append(time.perf_counter() - begun)
        return logs

    def _run_several(
        self, graph: StepGraph, data: Any, tensors: list[Tensor], shape: Hashable
    ) -> bool:
        """Make this step and those of the batches that follow as one program, or return False."""
        loop, update, batches = graph.loop, self._update, [tensors]
        if loop is None or update is None or not loop.is_usable(update):
            return False
        for each in (made := list(following(data))[: graph.at_once - 1]):
            batches.append([])
            if _shape(each, batches[-1]) != shape:
                batches.pop()
                break
        if not loop.run(batches, update):
            return False
        self._made, self._unread = made[: len(batches) - 1][::-1], graph.unread()
        return True

    def _own(self) -> Callable[[Any], Any]:
        """Return Keras' own step."""
        if self._channels_last is None:
            self._channels_last = all_keras(self._model)
        own: Callable[[Any], Any] = type(self._model).train_step.__get__(self._model)
        return without_copies(own) if self._channels_last else own

    def _compare_settings(self) -> bool:
        """Drop all graphs if the model's settings have changed; returns whether they have."""
        self.stale, self._channels_last, settings = False, None, StepSettings(self._model)
        self._why = _why_not(self._model, settings)
        optimizer = self._model.optimizer
        variables = self._model.trainable_variables
        self._update = None if self._why else PlannedUpdate.of(optimizer, variables)
        if changed := settings != self._settings:
            self._settings, self._graphs = settings, {}
            if self._why:
                log.debug("the training step is not captured: %s.", self._why)
        return changed

    def _capture(
        self, key: Hashable, own: Callable[[Any], Any], data: Any, tensors: list[Tensor]
    ) -> Any:
        """Trace the step, then make it, and keep the graph if both give the same bits."""
        self._compare_settings()  # the first step may have built variables
        if self._why:
            return own(data)
        self._graphs[key] = None
        try:
            with torch.random.fork_rng(gpu_in_use()):  # a trace may draw; the step has yet to run
                graph = StepGraph(self._model, own, data, tensors)
                graph.predict(tensors)
                loop = self._looped(graph, tensors) if self.is_open else None
        except Exception as error:  # the step does something that cannot be traced
            log.debug("the training step is not captured: %s: %s", type(error).__name__, error)
            return own(data)
        with graph.listening() as gradients:
            logs = own(data)
        if graph.was_right(gradients, logs):
            self._graphs[key] = graph
            graph.at_once = max(1, int(AT_ONCE / min(self._seen[key])))
            if loop is not None and self._update and loop.was_right(self._update):
                graph.loop = loop
        else:
            log.debug("the training step is not captured: the graph gives other numbers.")
        return logs

    def _looped(self, graph: StepGraph, tensors: list[Tensor]) -> StepLoop | None:
        """Return a program of several steps, or None if there can be none."""
        try:
            return graph.looped(tensors, self._update)
        except Exception as error:  # TorchScript cannot compile it
            log.debug("training steps run one by one: %s: %s", type(error).__name__, error)
            return None


def _shape(data: Any, tensors: list[Tensor]) -> Hashable:
    """Return what a graph depends on of a batch, and collect its tensors; None if the batch has
    anything but strided tensors in lists, tuples and dicts."""
    if isinstance(data, Tensor):
        if data.layout != torch.strided:
            return None
        tensors.append(data)
        return data.shape, data.stride(), data.dtype, data.device
    if data is None:
        return "none"
    if not isinstance(data, list | tuple | dict):
        return None
    names = tuple(data) if isinstance(data, dict) else ()
    each_part = data.values() if isinstance(data, dict) else data
    inside = tuple(_shape(each, tensors) for each in each_part)
    return None if None in inside else (type(data), names, inside)


def _why_not(model: Any, settings: StepSettings) -> str | None:
    """Return why a step may not be traced; None if it may."""
    layers = list(model._flatten_layers())
    if settings.foreign is not None:
        return f"{settings.foreign} is not Keras' own"
    changed = {"call", "compute_loss", "compute_metrics"} & set(model.__dict__)
    if changed or model.run_eagerly or has_own(model, "train_step") or not model.optimizer:
        return "it is to run as it is written"
    if settings.variables.keys() - {id(v) for v in (*model.variables, *model.metrics_variables)}:
        return "a variable takes part that is not the model's"
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        return "the loss is scaled by what gradients were before"
    if any(isinstance(each, _LONG) for each in layers):
        return "a layer runs over time"
    if any(each.activity_regularizer is not None or "call" in each.__dict__ for each in layers):
        return "a layer's call has something beside it"
    if any(getattr(each, kind) for each in layers for kind in MODULE_HOOKS) or has_global_hooks():
        return "there are hooks on layers"
    if any(True for each in layers for _ in each.buffers()):
        return "modules of torch keep something in mind"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    kinds = {each.compute_dtype for each in layers} | {v.dtype for v in model.trainable_variables}
    if kinds - {"float32"} or not model.trainable_variables:
        return "not everything is float32"
    return None


# --- settings: everything but tensors that decides what a step does -------------------------------
#
# Two steps of equal settings have the same operators, if they run no code but Keras' own.


_VALUES = frozenset({complex, bytes, type(...)})
_NAMED = (type, types.ModuleType, enum.Enum, torch.dtype, torch.device, np.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc)
#: kinds of objects that have no part in the operators of a step
_IGNORED = (keras.KerasTensor, keras.Initializer, keras.Optimizer)
#: attributes that are torch's own, bookkeeping of Keras, or written by a step itself
_IGNORED_ATTRIBUTES = MODULE_ATTRIBUTES | BOOKKEEPING
_LARGE = 1 << 16


class StepSettings:
    """All settings of a model's parts. `foreign`: the first part that is not Keras' own."""

    def __init__(self, model: Any) -> None:
        self.foreign: str | None = None
        #: every variable that a part of the model holds
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
        """Describe the arguments that an operation of a functional model gets beside tensors."""
        given = [node.arguments for node in operation._inbound_nodes]
        return tuple(self._of((each.args, each.kwargs)) for each in given)

    def _of(self, value: Any) -> Any:
        return snapshot(value, self._single)

    def _single(self, value: Any) -> Any:
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        if isinstance(value, _IGNORED):
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
            if name not in _IGNORED_ATTRIBUTES
        ]

    def _ask(self, made: Any, value: Any) -> bool:
        """Whether a class or function is Keras' own; `Lambda` and the like run the user's code."""
        home = str(getattr(made, "__module__", None))
        wraps = made in (keras.layers.Lambda, keras.layers.TorchModuleWrapper)
        own = home.startswith(("keras.", "stratagem.")) and not wraps and hasattr(made, "__dict__")
        if not own:
            self.foreign = self.foreign or str(getattr(value, "name", value))
        return own
