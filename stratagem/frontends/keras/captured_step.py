"""A training step of Keras' own parts, traced once and run without their Python.

After some steps on batches of one shape, `train_step` is traced into one graph of operators:

    weights, states, batch  ->  gradients, new states, logs

The graph takes the place of the step when it has given the same, bit for bit, as the step itself on
the batch at hand. Gradients go the way of any other, through backward, so that whoever listens
there (an all-reduce, servers, hooks of the user) gets them; the update is the optimizer's.

A step stays as it is where there is code that is not Keras' own, where random numbers are drawn or
values decide what is done, in other types than float32, and while callbacks of the user act between
steps. Whatever was traced is forgotten when `StepSettings` of the model have changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.compat.torch_names import (
    MODULE_HOOKS,
    TENSOR_HOOKS,
    OpOverload,
    copy_all,
    has_global_hooks,
    scripted,
    traced,
)
from stratagem.frontends.keras.image_layout import all_keras, without_copies
from stratagem.frontends.keras.step_logs import has_own
from stratagem.frontends.keras.step_settings import StepSettings
from stratagem.wire.device_kinds import gpu_in_use

log = logging.getLogger("stratagem")

#: steps on batches of one shape before it is traced, and shapes at most
AFTER, SHAPES = 16, 8
#: seconds of a step in which a few milliseconds of Python do not show
LONG_STEP = 0.05
#: where Python decides how often something is done, graphs are long
_LONG = (keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed)


class CapturedStep:
    """The training step of one copy of a model.

    `stale`: somebody may have changed the model; `between_steps`: so they may before each step,
    and no step is captured.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.stale, self.between_steps = model, True, False
        #: whether a call is under way in which this process trains alone
        self.is_open = False
        self._settings: StepSettings | None = None
        #: how long each step took, by what it was made of
        self._seen: dict[Hashable, list[float]] = {}
        self._graphs: dict[Hashable, _StepGraph | None] = {}
        self._why: str | None = None
        #: whether images may stay as they lie; None: to be looked at
        self._lies: bool | None = None

    @contextmanager
    def during(self, *, between_steps: bool) -> Iterator[None]:
        """A call of the user's, or one inside of another."""
        before = self.is_open, self.between_steps
        self.stale, self.is_open, self.between_steps = True, True, before[1] or between_steps
        self._lies = None
        try:
            yield
        finally:
            self.is_open, self.between_steps = before

    def __call__(self, data: Any, share: Hashable = None) -> Any:
        """The step on these rows, which are this share of a batch; returns its logs."""
        if self.between_steps:
            self.stale = True  # to look through a model before each step takes too long
            return self._own()(data)
        if self.stale and self._look():
            self._seen = {}
        own = self._own()
        tensors: list[Tensor] = []
        shape = None if self._why else _shape(data, tensors)
        if shape is None:
            return own(data)
        key = (shape, share)
        if key in self._graphs:
            graph = self._graphs[key]
            return own(data) if graph is None else graph.run(tensors)
        seen = self._seen.setdefault(key, [])
        if len(self._graphs) == SHAPES or (len(seen) >= AFTER and min(seen) > LONG_STEP):
            return own(data)
        if len(seen) >= AFTER:
            return self._capture(key, own, data, tensors)
        begun = time.perf_counter()
        logs = own(data)
        seen.append(time.perf_counter() - begun)
        return logs

    def _own(self) -> Callable[[Any], Any]:
        """The model's own step."""
        if self._lies is None:
            self._lies = all_keras(self._model)
        own: Callable[[Any], Any] = type(self._model).train_step.__get__(self._model)
        return without_copies(own) if self._lies else own

    def _look(self) -> bool:
        """Forget all graphs if the model is not what it was; whether it is not."""
        self.stale, self._lies, settings = False, None, StepSettings(self._model)
        self._why = _why_not(self._model, settings)
        if changed := settings != self._settings:
            self._settings, self._graphs = settings, {}
            if self._why:
                log.debug("the training step is not captured: %s.", self._why)
        return changed

    def _capture(
        self, key: Hashable, own: Callable[[Any], Any], data: Any, tensors: list[Tensor]
    ) -> Any:
        """Trace the step, then make it, and keep the graph if both have given the same."""
        self._look()  # the first step has built what is there now
        if self._why:
            return own(data)
        self._graphs[key] = None
        try:
            with torch.random.fork_rng(gpu_in_use()):  # tracing may draw: the step has not yet
                graph = _StepGraph(self._model, own, data, tensors)
                graph.foretell(tensors)
        except Exception as error:  # whatever the step does that a graph cannot have
            log.debug("the training step is not captured: %s: %s", type(error).__name__, error)
            return own(data)
        with graph.listening() as gradients:
            logs = own(data)
        if graph.told(gradients, logs):
            self._graphs[key] = graph
        else:
            log.debug("the training step is not captured: the graph gives other numbers.")
        return logs


class _StepGraph:
    """One step's graph, for batches of one shape."""

    def __init__(
        self, model: Any, own: Callable[[Any], Any], data: Any, tensors: list[Tensor]
    ) -> None:
        self._model, self._own, self._data = model, own, data
        self._variables = list(model.trainable_variables)
        self._weights: list[Tensor] = [v.value for v in self._variables]
        beside = [*model.non_trainable_variables, *model.metrics_variables]
        self._beside = list({id(v): v for v in beside}.values())
        self._held = [*self._weights, *(v.value for v in self._beside)]
        #: what the graph has a gradient of, what it writes, and what the logs are called
        self._used: list[int] = []
        self._written: list[Tensor] = []
        #: of a worker of servers, which is told of the loss before gradients come
        self._listener = model._loss_tracker.__dict__.get("update_state")
        self._rows = len(tensors[0])
        self._names: list[str] = []
        graph = traced(self._step, [*self._held, *tensors])
        _refuse(graph)
        self._graph: Any = scripted(graph, [*self._held, *tensors])
        self._data = None
        self._foretold: Sequence[Tensor] = ()

    def _step(self, *tensors: Tensor) -> list[Tensor]:
        """The step itself, on these values, and without a trace of it in the model."""
        count, states = len(self._weights), tensors[len(self._weights) :][: len(self._beside)]
        weights = [t.detach().requires_grad_() for t in tensors[:count]]
        data = _packed(self._data, iter(tensors[count + len(states) :]))
        values = [
            *zip(self._variables, weights, strict=True),
            *zip(self._beside, states, strict=True),
        ]
        given, losses, tracker = [], [], self._model._loss_tracker

        def note(loss: Tensor, sample_weight: Any = None) -> Any:
            losses.append(loss.detach())
            return type(tracker).update_state(tracker, loss, sample_weight=sample_weight)

        with (
            _overlaid(self._model.optimizer, "apply", lambda grads, _: given.extend(grads)),
            _overlaid(tracker, "update_state", note),
            torch.enable_grad(),
            keras.StatelessScope(state_mapping=values) as scope,
        ):
            logs = self._own(data)
        self._used = [i for i, grad in enumerate(given) if grad is not None]
        news = [scope.get_current_value(v) for v in self._beside]
        heard = {id(v) for v in tracker.variables if self._listener is not None}
        pairs = enumerate(zip(news, states, self._beside, strict=True))
        changed = [i for i, (new, old, v) in pairs if new is not old and id(v) not in heard]
        self._written = [self._beside[i].value for i in changed]
        self._names = list(logs)
        gradients = [given[i].contiguous() for i in self._used]
        results = [each.detach() for each in logs.values()]
        return [*gradients, *(news[i] for i in changed), *results, losses[0]]

    def run(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """The step: gradients, states, update; returns the logs."""
        weights = self._weights
        for weight in weights:
            weight.grad = None
        with torch.no_grad():
            gradients, news, (*logs, loss) = self._split(self._graph(*self._held, *tensors))
            copy_all(self._written, news)
            if self._listener is not None:
                self._listener(loss, sample_weight=self._rows)
            self._hand_in(gradients)
            self._model.optimizer.apply([weight.grad for weight in weights], self._variables)
        return dict(zip(self._names, logs, strict=True))

    def _hand_in(self, gradients: list[Tensor]) -> None:
        """Through backward if anybody listens there."""
        used = [self._weights[i] for i in self._used]
        if any(getattr(weight, kind) for weight in used for kind in TENSOR_HOOKS):
            with torch.enable_grad():
                _Handed.apply(gradients, *used).backward()  # type: ignore[no-untyped-call]
        else:
            for weight, gradient in zip(used, gradients, strict=True):
                weight.grad = gradient

    def _split(self, found: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first, second = len(self._used), len(self._used) + len(self._written)
        return list(found[:first]), list(found[first:second]), list(found[second:])

    # --- the proof ----------------------------------------------------------------------------

    def foretell(self, tensors: list[Tensor]) -> None:
        """Say what the next step will do; twice, since the first run makes the program."""
        with torch.no_grad():
            for _ in range(2):
                self._foretold = self._graph(*self._held, *tensors)
        if _overlap(self._foretold[: len(self._used)], self._held):
            raise ValueError("gradients share memory")

    @contextmanager
    def listening(self) -> Iterator[dict[int, Tensor]]:
        """While a step is made: the gradients as backward makes them, before they are added up."""
        found: dict[int, Tensor] = {}

        def hook(index: int) -> Callable[[Tensor], None]:
            return lambda grad: found.__setitem__(index, grad.clone())

        weights: list[Any] = list(self._weights)
        hooks = [weight.register_hook(hook(i)) for i, weight in enumerate(weights)]
        try:
            yield found
        finally:
            for each in hooks:
                each.remove()

    def told(self, gradients: dict[int, Tensor], logs: Any) -> bool:
        """Whether the step has done what was foretold."""
        if sorted(gradients) != self._used or list(logs) != self._names:
            return False
        real = [gradients[i] for i in self._used] + self._written + list(logs.values())
        foretold, self._foretold = self._foretold, ()
        return all(_same(a, b) for a, b in zip(real, foretold[:-1], strict=True))


@contextmanager
def _overlaid(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another method in the place of one, whether or not there is one in its place already."""
    before = owner.__dict__.get(name)
    owner.__dict__[name] = function
    try:
        yield
    finally:
        del owner.__dict__[name]
        if before is not None:
            owner.__dict__[name] = before


class _Handed(torch.autograd.Function):
    """Gradients that are there already, on their way through backward."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        handed, ctx.gradients = (None, *ctx.gradients), None
        return handed


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and bool(torch.equal(a.detach(), b))


def _refuse(graph: Any) -> None:
    """A graph that the next step may not have."""
    for node in graph.graph.nodes:
        tags = node.target.tags if isinstance(node.target, OpOverload) else ()
        if torch.Tag.nondeterministic_seeded in tags:
            raise ValueError(f"{node.target} draws random numbers")
        if torch.Tag.data_dependent_output in tags or _sized_by_values(node, tags):
            raise ValueError(f"values decide how large the result of {node.target} is")
        literal = all("lift_fresh" in str(user.target) for user in node.users)
        if node.op == "get_attr" and not literal:
            raise ValueError("a tensor that is no state of the model takes part")


def _sized_by_values(node: Any, tags: Any) -> bool:
    """Indexing is so by masks only."""
    if torch.Tag.dynamic_output_shape not in tags or node.target is not torch.ops.aten.index.Tensor:
        return torch.Tag.dynamic_output_shape in tags
    kinds = [each.meta["tensor_meta"].dtype for each in node.args[1] if each is not None]
    return torch.bool in kinds or torch.uint8 in kinds


def _overlap(gradients: Sequence[Tensor], held: Sequence[Tensor]) -> bool:
    """Whether a gradient lies where another or something else lies."""
    places = [(*_place(each), True) for each in gradients]
    places += [(*_place(each), False) for each in held]
    end_of_all = end_of_gradients = 0
    for start, end, is_gradient in sorted(place for place in places if place[0] < place[1]):
        if start < (end_of_all if is_gradient else end_of_gradients):
            return True
        end_of_all = max(end_of_all, end)
        end_of_gradients = max(end_of_gradients, end) if is_gradient else end_of_gradients
    return False


def _place(tensor: Tensor) -> tuple[int, int]:
    """The first byte and that after the last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in pairs)
    first = tensor.data_ptr()
    return first, first + (reach * tensor.element_size() if tensor.numel() else 0)


def _shape(data: Any, tensors: list[Tensor]) -> Hashable:
    """What a graph is traced for, and the tensors in it; None of what is something else."""
    if isinstance(data, Tensor):
        tensors.append(data)
        return data.shape, data.dtype, data.device
    if data is None:
        return "none"
    if not isinstance(data, list | tuple | dict):
        return None
    names = tuple(data) if isinstance(data, dict) else ()
    each_part = data.values() if isinstance(data, dict) else data
    inside = tuple(_shape(each, tensors) for each in each_part)
    return None if None in inside else (type(data), names, inside)


def _packed(data: Any, tensors: Iterator[Tensor]) -> Any:
    """The same, of these tensors."""
    if isinstance(data, dict):
        return {name: _packed(each, tensors) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return type(data)([_packed(each, tensors) for each in data])
    return None if data is None else next(tensors)


def _why_not(model: Any, settings: StepSettings) -> str | None:
    """Why a step must be made as it is; None if it may be traced."""
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
