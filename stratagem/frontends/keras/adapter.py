"""One copy of a Keras model on one device, of a replica or of a worker.

    become, follow, take    copy the chief's model, and later changes of it
    play                    the model's own step on this device's rows, with exact denominators
    test, predict           one batch, shared by all replicas
    drain, average, logs    gather counts of metrics, moving statistics and logs of all copies

Collective methods are called by every replica, or by every device of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor
from torch.nn import Module

from stratagem.data.shares import rows, share
from stratagem.data.streams import generator_states
from stratagem.errors import UsageError
from stratagem.frontends.adapter import check_rows
from stratagem.frontends.keras.captured_step import CapturedStep
from stratagem.frontends.keras.denominators import BatchPart, made_exact, whole_activity
from stratagem.frontends.keras.model_pickle import optimizers
from stratagem.frontends.keras.step_logs import (
    MetricStates,
    Sources,
    flat,
    has_own,
    number,
    restorer,
    user_metrics,
)
from stratagem.state.change_tracker import AttributeTracker, Change, TensorTracker, adopt
from stratagem.training.hints import explaining
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica
from stratagem.training.replica_state import set_random
from stratagem.wire.tree import gather_tree


class KerasAdapter:
    """Runs the steps of one copy. `updates`: its own optimizer updates it; otherwise servers do."""

    def __init__(self, model: Any, part: BatchPart, *, updates: bool) -> None:
        self.model, self.part, self.updates = model, part, updates
        self.replica: Replica = part.replica
        self.optimizers = optimizers(model)
        self.captured = CapturedStep(model)
        model.__dict__.setdefault("_stratagem", None)  # Keras leaves copies alone, too: scope.py
        #: by step that the user has written: which metrics its logs are
        self.sources = {
            step: Sources(model) for step in ("train_step", "test_step") if has_own(model, step)
        }
        # servers add up the loss of Keras' own step, which updates the tracker before it calls the
        # optimizer; a custom step may update it later, or with other weights
        self.metrics = MetricStates(model, tracker=updates or "train_step" in self.sources)
        #: on the chief: tracks changes of plain attributes
        self.attributes: Attributes | None = None
        #: what the last training or test step returned
        self.last: Any = None
        self._tensors: list[Tensor] = []
        #: how often each tensor had been written to when all copies were last alike
        self._writes = TensorTracker()

    def own(self, name: str) -> Callable[..., Any]:
        """Return the model's own method, which the driver has replaced."""
        method: Callable[..., Any] = getattr(type(self.model), name).__get__(self.model)
        return method

    # --- like the chief's -------------------------------------------------------------------

    def build(self, example: Any) -> None:
        """Build the model and its optimizer, if they are not yet."""
        model, optimizer = self.model, self.model.optimizer
        if not is_whole(model):
            with torch.no_grad():
                model(keras.utils.unpack_x_y_sample_weight(self.here(example))[0])
        model._track_variables()  # as fit does: a custom build() or LoRA made variables since
        if self.updates and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)

    def described(self, example: Any, seed: int) -> dict[str, Any]:
        """As the chief: return what another copy needs to become like this one, but for values."""
        self.attributes = Attributes(self.model)
        everything = [list(each) for each in self.attributes.everything()]
        trained = trainable(self.model)
        return {"example": example, "seed": seed, "attributes": everything, "trainable": trained}

    def become(self, told: dict[str, Any]) -> None:
        """Become like the chief's copy, of which `told` has what the pickled model lacks."""
        if not self.replica.is_chief:
            self.build(told.get("example"))
            if "trainable" in told:
                self.follow(told["attributes"], told["trainable"])
            for metric in user_metrics(self.model):
                metric.reset_state()  # the pickled model has the chief's counts
            self.metrics.begin()
        self.arrive()
        if told.get("values") is not None:
            self.take(list(enumerate(told["values"])))

    def arrive(self) -> None:
        """Move all variables to this device, and list its tensors."""
        variables = [*self.model.variables, *self.model.metrics_variables]
        if self.updates:
            variables += [v for optimizer in self.optimizers for v in optimizer.variables]
        for variable in variables:
            if variable.value.device != self.replica.device:
                variable.value.data = variable.value.data.to(self.replica.device)
        self._tensors = []
        self._tensors = self.tensors()

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are the same on all copies, the optimizers' last: with servers
        only the chief has these. Kept once all is built, since each step asks twice."""
        if self._tensors:
            return self._tensors
        slots = [v.value for optimizer in self.optimizers for v in optimizer.variables]
        return [*(v.value for v in self.model.weights), *_buffers(self.model), *slots]

    # --- changes between steps --------------------------------------------------------------

    def mark(self) -> None:
        """As the chief: note that all copies have the same tensors now."""
        self._writes.mark(self.tensors())

    def written(self) -> list[tuple[int, Tensor]]:
        """Return numbers and values of the tensors that were written to since `mark`."""
        mine = self.tensors()
        return [(i, mine[i].detach()) for i in self._writes.changes(mine)]

    def follow(self, changes: Sequence[Any], trainable: Sequence[bool] | None = None) -> None:
        """Take over attributes that were changed on the chief, and which weights are trained."""
        self.captured.stale = True
        if self.replica.is_chief:
            return
        adopt(attribute_owners(self.model), list(changes))
        for variable, wanted in zip(self.model.weights, trainable or (), strict=False):
            if variable.trainable != wanted:
                variable.trainable = wanted

    @torch.no_grad()
    def take(self, values: Iterable[tuple[int, Tensor]]) -> None:
        """Copy tensors that were written to on the chief."""
        if not self.replica.is_chief:
            mine = self.tensors()
            for index, value in values:
                mine[index].copy_(value)

    # --- steps ------------------------------------------------------------------------------

    def play(self, step: str, data: Any) -> Any:
        """Run the model's own step on this device's rows of the part; returns its logs."""
        part, sources = self.part, self.sources.get(step)
        mine = self.here(part.rows(data))
        with ExitStack() as held:
            held.enter_context(explaining(part.share.examples, part.share.total))
            if sources is not None:
                held.enter_context(sources.listening())
            if not part.plain:
                held.enter_context(made_exact(part))
                held.enter_context(whole_activity(self.model, part))
            if not part.share.examples:  # the step is on a borrowed row
                held.callback(restorer(partial(_counts, self.model)))
            if step == "train_step" and sources is None and part.share.examples:
                self.last = self.captured(mine, (part.share.examples, part.share.total))
            else:
                self.last = self.own(step)(mine)
        return self.last

    def here(self, data: Any) -> Any:
        return data if self.replica.device.type == "cpu" else to_device(data, self.replica.device)

    def mode(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    @torch.no_grad()
    def test(self, data: Any, total: int) -> Any:
        self.mode(False)
        self.part.begin(total, total)
        return self.play("test_step", data)

    @torch.no_grad()
    def predict(self, data: Any, total: int) -> list[Any]:
        """Return the outputs of every replica, in order; an empty share has none. Collective."""
        self.mode(False)
        cuts = [share(total, self.replica.count, index) for index in range(self.replica.count)]
        start, end = cuts[self.replica.index]
        mine = None
        if end > start:
            with explaining(end - start, total):
                mine = self.own("predict_step")(self.here(rows(data, start, end)))
        parts = [part for part in gather_tree(self.replica.collective, mine) if part is not None]
        check_rows(parts, [end - start for start, end in cuts if end > start])
        return parts

    # --- together ---------------------------------------------------------------------------

    def drain(self) -> None:
        """Add the metrics' counts of all copies up in the first, and reset the rest. Collective."""
        sources, mine = self.sources.get("train_step"), None
        if not self.replica.leads:
            mine = [self.metrics.hand_over(), {} if sources is None else sources.known]
        for counts, known in gather_tree(self.replica.collective, mine)[1:]:
            if self.replica.leads:
                self.metrics.add(counts)
                if sources is not None:
                    sources.join(known)

    @torch.no_grad()
    def average(self) -> None:
        """Set moving statistics to their mean over the copies. Collective."""
        floats = [tensor for tensor in kept(self.model) if tensor.is_floating_point()]
        if floats:
            copies = gather_tree(self.replica.collective, [t.detach() for t in floats])
            for i, tensor in enumerate(floats):
                tensor.copy_(sum(copy[i].double() for copy in copies) / self.replica.count)

    def logs(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means of logs that the last custom step returned. Collective."""
        returned = flat(self.last)
        return self.mean({name: number(returned[name]) for name in names})

    def mean(self, mine: dict[str, float]) -> dict[str, float]:
        """Return the means of numbers over the rows of all devices. Collective."""
        weight = self.replica.share.weight
        parts = gather_tree(self.replica.collective, {k: v * weight for k, v in mine.items()})
        return {key: sum(part[key] for part in parts) for key in mine}


def device_name(replica: Replica) -> str:
    """Return the name of the replica's device for `keras.device`."""
    device = replica.device
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def is_whole(model: Any) -> bool:
    """Whether all variables are made: Keras' fit asks every layer. An optimizer is built last."""
    if model.optimizer is not None and model.optimizer.built:
        return bool(model.built)
    return all(layer.built for layer in model._flatten_layers())


def trainable(model: Any) -> list[bool]:
    return [bool(v.trainable) for v in model.weights]


def kept(model: Any) -> list[Tensor]:
    """Return the state of layers that is not trained: moving statistics and the like."""
    return [*(v.value for v in model.non_trainable_weights), *_buffers(model)]


def roll_dice(model: Any, seed: int, index: int) -> None:
    """Seed this copy's random numbers: different on every copy, all from the chief's seed."""
    keras.utils.set_random_seed((seed + 7919 * index) % 2**31)
    known = {id(v) for v in (*model.weights, *model.metrics_variables)}
    for variable in model.non_trainable_variables:
        if id(variable) not in known and "seed" in variable.path:
            with torch.no_grad():
                variable.value[0] = (variable.value[0] + 104729 * index) % 2**31


def own_variables(model: Any) -> list[Tensor]:
    """Return the state that may differ between copies, but for metrics: statistics, seeds."""
    metrics = {id(v) for v in model.metrics_variables}
    found = [v.value for v in model.non_trainable_variables if id(v) not in metrics]
    return [*found, *_buffers(model)]


def replica_progress(model: Any, replica: Replica) -> dict[str, Any]:
    """Return what a backup saves of this replica beside weights, optimizer and metrics."""
    kept = [tensor.detach().cpu().clone() for tensor in own_variables(model)]
    return {"random": generator_states(replica.device), "kept": kept}


@torch.no_grad()
def take_progress(model: Any, saved: dict[str, Any] | None, replica: Replica) -> None:
    """Restore what `replica_progress` has saved; None: the backup had fewer replicas."""
    if saved is not None:
        for mine, value in zip(own_variables(model), saved["kept"], strict=True):
            mine.copy_(value)
        set_random(replica, saved["random"])


def _buffers(model: Any) -> list[Tensor]:
    """Return the buffers of torch modules inside the model."""
    layers = model._flatten_layers()
    return list({id(b): b for layer in layers for b in layer.buffers()}.values())


def _counts(model: Any) -> list[Any]:
    """Return what a step changes beside the weights: metrics, statistics of layers."""
    return [*model.metrics_variables, *model.non_trainable_weights]


# --- plain attributes, which callbacks may change -------------------------------------------------
#
# Functions cannot be sent to other processes: a replaced one is refused.


#: attributes that Keras and torch set by themselves on every replica
_THEIR_OWN = frozenset({"training", "built"})


class Attributes(AttributeTracker):
    """Tracks changes of plain attributes, and whether functions were replaced."""

    def __init__(self, model: Any) -> None:
        super().__init__(attribute_owners(model), _THEIR_OWN)
        self._functions = self._callables()

    def changed(self) -> list[Change]:
        """Return the changes since the last call."""
        if found := self.changes():
            self.mark()
        return found

    def replaced(self) -> str | None:
        """Return the name of a layer's function that was replaced, if there is one."""
        now = self._callables()
        for (i, name), value in self._functions.items():
            if now.get((i, name), value) is not value:
                return f"{self.objects[i].name}.{name}"
        return None

    def refuse_replaced(self) -> None:
        """Raise if a function was replaced while the model trains."""
        if name := self.replaced():
            raise UsageError(
                f"{name} was replaced while the model trains, which the other replicas cannot "
                "follow; replace it between two calls of fit, or have the layer look at a number "
                "that the callback changes."
            )

    def _callables(self) -> dict[tuple[int, str], Any]:
        """Activations, for example; a model's own attributes Keras changes itself."""
        return {
            (i, name): value
            for i, obj in enumerate(self.objects)
            if isinstance(obj, keras.Layer) and not isinstance(obj, keras.Model)
            for name, value in obj.__dict__.items()
            if callable(value) and not isinstance(value, Module)
        }


def attribute_owners(model: Any) -> list[Any]:
    """What has such attributes, in the same order on every replica."""
    optimizer = model.optimizer
    others = [optimizer, getattr(optimizer, "inner_optimizer", None)]
    others += [each for each in keras.tree.flatten(model.loss) if hasattr(each, "__dict__")]
    return [*model._flatten_layers(), *(each for each in others if each is not None)]
