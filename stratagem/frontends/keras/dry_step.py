"""Dry runs of a step of a Keras model, which record outputs, gradients and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.frontends.keras.adapter import Attributes
from stratagem.frontends.keras.denominators import BatchPart, made_exact, whole_activity
from stratagem.frontends.keras.model_pickle import optimizers
from stratagem.frontends.keras.row_means import assignable
from stratagem.frontends.keras.step_logs import user_metrics
from stratagem.frontends.row_trials import Outcome, copied
from stratagem.state.change_tracker import TensorTracker
from stratagem.training.isolated_run import Replacement, dry_run, norms_by_row, replaced
from stratagem.training.replica import Replica


class Trial(BatchPart):
    """One of two shares of a batch; `other` is the share that was run before, with its divisors."""

    def __init__(
        self, replica: Replica, examples: int, total: int, other: Trial | None = None
    ) -> None:
        super().__init__(replica)
        self.begin(examples, total)
        self.noted: list[Tensor] = []
        self._others = None if other is None else iter(other.noted)

    def gathered(self, own: Tensor) -> list[Tensor]:
        self.noted.append(own)
        return [own] if self._others is None else [own, next(self._others)]

    def divided(self, by: float | None) -> float | None:
        if by is None:
            return 1.0
        total = float(sum(self.gathered(torch.tensor(by, dtype=torch.float64))))
        if not total:
            return 1.0
        return by / total * self.total / self.examples if by else None


@dataclass
class Run(Outcome):
    """The record of one dry run, of a step or of several in turn; `loss`: the log of that name."""

    weight: float = 1.0
    #: by variable, the gradient of each backward pass
    passes: list[list[Tensor]] = field(default_factory=list)
    #: by metric, the count in each variable
    counts: dict[int, list[Tensor]] = field(default_factory=dict)
    #: by metric, the values before, to whose size counts are rounded
    bases: dict[int, list[Tensor]] = field(default_factory=dict)
    #: by number of a variable that the step has set itself: the change
    moves: dict[int, Tensor] = field(default_factory=dict)
    #: the user's own metrics that were updated
    given: list[Any] = field(default_factory=list)
    #: whether random numbers were drawn, beside masks of a dropout
    noise: bool = False


class Bench:
    """Makes dry runs of a step of one model."""

    def __init__(self, model: Any, step: str) -> None:
        self.model, self.step = model, step
        self.trains = step == "train_step"
        #: variables that a step may set itself
        self.states = assignable(model) if self.trains else []
        self._modules = modules_of(model)
        self._norms = _norms_by_row(model, self._modules) if self.trains else []

    @cached_property
    def _optimizers(self) -> list[Any]:
        return optimizers(self.model)

    def _own(self) -> Callable[..., Any]:
        own: Callable[..., Any] = getattr(type(self.model), self.step).__get__(self.model)
        return own

    def run(
        self,
        batches: list[Any],
        trial: Trial | None = None,
        *,
        disturbed: bool = False,
        reduced: Run | None = None,
    ) -> Run:
        """Make a step on each batch; `reduced`: the run whose gradients backward makes."""
        model, own = self.model, self._own()
        run = Run(weight=1.0 if trial is None else trial.share.weight)
        with ExitStack() as held:
            held.enter_context(_as_before(model, self._modules))
            journal = held.enter_context(dry_run(disturbed=disturbed))
            watches = self.step != "predict_step"
            held.enter_context(_watched(model, run, self._optimizers, reduced, outputs=watches))
            held.enter_context(torch.set_grad_enabled(self.trains))
            model.train(self.trains)
            held.enter_context(replaced(self._norms))
            if trial is not None:
                held.enter_context(made_exact(trial))
                held.enter_context(whole_activity(model, trial))
            type(model).reset_metrics(model)  # beside a long epoch's sums small counts are rounded
            run.bases = {id(m): [_plain(v) for v in m.variables] for m in user_metrics(model)}
            writes = TensorTracker([v.value for v in self.states])
            for batch in batches:
                returned = own(batch)
            returned = keras.tree.map_structure(copied, returned)
            states = {i: _plain(self.states[i]) for i in writes.changes()}
            counted = {id(m): [_plain(v) for v in m.variables] for m in user_metrics(model)}
        run.epsilon, run.noise = journal.epsilon, journal.noise
        run.moves = {i: value - _plain(self.states[i]) for i, value in states.items()}
        run.gradients = [gradient for each in run.passes for gradient in each]
        for key, after in counted.items():
            before = run.bases.get(key) or [torch.zeros(())] * len(after)
            run.bases[key] = before
            run.counts[key] = [a - b for a, b in zip(after, before, strict=True)]
        if self.step == "predict_step":
            run.outputs = keras.tree.flatten(returned)
        elif isinstance(returned, dict) and "loss" in returned:
            loss = torch.as_tensor(returned["loss"])
            run.loss = None if loss.shape else float(loss)
        return run


def _plain(variable: Any) -> Tensor:
    value: Tensor = variable.value
    return value.detach().to("cpu", torch.float64, copy=True)


@contextmanager
def _as_before(model: Any, modules: list[Any]) -> Iterator[None]:
    """Put back plain attributes, the mode and gradients; the journal puts back tensors. Gradient
    hooks are removed meanwhile: they would send the gradients."""
    plain = Attributes(model).values()
    modes = [(module, module.training) for module in modules]
    grads = [(v.value, v.value.grad) for v in model.variables]
    found = (v.value._post_accumulate_grad_hooks for v in model.variables)
    removed = [(hooks, dict(hooks)) for hooks in found if hooks]
    for hooks, _ in removed:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.update(before)
        for obj, values in plain:
            vars(obj).update(values)
        for module, training in modes:
            module.training = training
        for tensor, grad in grads:
            tensor.grad = grad


def modules_of(model: Any) -> list[Any]:
    """Return the model's layers, and torch modules inside of them."""
    found = (module for layer in model._flatten_layers() for module in layer.modules())
    return list({id(module): module for module in found}.values())


@contextmanager
def _watched(
    model: Any, run: Run, optimizers: list[Any], reduced: Run | None, *, outputs: bool
) -> Iterator[None]:
    """Record outputs and gradients; optimizers do nothing."""
    methods = _noting_outputs(model, run) if outputs else []
    methods += [(each, "apply", lambda *args, **kwargs: None) for each in optimizers]
    own = [each for each in user_metrics(model) if not type(each).__module__.startswith("keras.")]
    methods += [(each, "update_state", _giving(each, run)) for each in own]
    variables = model.trainable_variables
    run.passes = [[] for _ in variables]
    whole = [None] * len(variables) if reduced is None else reduced.passes
    each_noted = zip(variables, run.passes, whole, strict=True)
    hooks = [v.value.register_hook(_noting(noted, other)) for v, noted, other in each_noted]
    try:
        with replaced(methods):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _noting_outputs(model: Any, run: Run) -> list[Replacement]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        run.outputs += map(copied, keras.tree.flatten(result))
        return result

    plain = type(model).call.__get__(model)
    return [(model, "call", wraps(plain)(call))]


def _giving(metric: Any, run: Run) -> Callable[..., Any]:
    def update_state(*args: Any, **kwargs: Any) -> Any:
        run.given.append(metric)
        return type(metric).update_state(metric, *args, **kwargs)

    return update_state


def _noting(noted: list[Tensor], reduced: list[Tensor] | None) -> Callable[[Tensor], Tensor | None]:
    def note(gradient: Tensor) -> Tensor | None:
        noted.append(gradient.detach().clone())
        return reduced[len(noted) - 1] if reduced and len(noted) <= len(reduced) else None

    return note


def _norms_by_row(model: Any, modules: list[Any]) -> list[Replacement]:
    kind = keras.layers.BatchNormalization
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kind)]
    return [*norms_by_row(modules), *((layer, "call", _by_row(layer)) for layer in layers)]


def _by_row(layer: Any) -> Callable[..., Any]:
    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return type(layer).call(layer, inputs, training=False, mask=mask)

    return call
