"""The session of one worker in the training of a Keras model with parameter servers.

It maps Keras' variables and optimizer to what servers keep, and puts each gradient that backward
finishes into the outbox. `TicketStep` (worker.py) commits them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable
from stratagem.frontends.keras.adapter import KerasAdapter, kept, roll_dice
from stratagem.frontends.keras.denominators import BatchPart, SharedPart
from stratagem.servers.client import Client
from stratagem.servers.session import Session
from stratagem.servers.task_main import in_group
from stratagem.servers.training_plan import Clip, TrainingPlan
from stratagem.state import keras_recipe
from stratagem.state.optimizer_recipe import OptimizerRecipe
from stratagem.state.partition import partition
from stratagem.training.replica import Replica
from stratagem.training.settings import Served, Settings


def adapter_of(model: Any, replica: Replica) -> KerasAdapter:
    """Return the adapter of a worker, or of one of its devices."""
    part = SharedPart(replica) if in_group(replica) else BatchPart(replica)
    return KerasAdapter(model, part, updates=False)


class Dismissed(Exception):
    """The training has no step; `told` is the chief's result."""

    def __init__(self, told: Any) -> None:
        super().__init__("a training without a step")
        self.told = told


class KerasSession(Session):
    """A session over Keras' variables and optimizer.

    `told` is the chief's description of its model, which the other workers' models adopt.
    """

    def __init__(
        self,
        worker: Client,
        adapter: KerasAdapter,
        settings: Settings,
        told: dict[str, Any] | None = None,
    ) -> None:
        self.adapter, optimizer = adapter, adapter.model.optimizer
        #: by variable: id and version of the gradient in the outbox, to see later changes of it
        self.made: list[tuple[int, int] | None] = []
        assert settings.served is not None
        super().__init__(
            worker,
            adapter.model,
            optimizer,
            settings.served,
            wire=settings.wire,
            clip=Clip(_clip_norm(optimizer), margin=0.0),
            told=told,
        )

    def _find(self) -> None:
        model = self.adapter.model
        self.params, self.beside = [], []
        if not model.built:
            return  # `become` builds it, from the chief's first example
        self.adapter.arrive()
        self.variables = list(model.trainable_variables)
        self.params = [v.value for v in self.variables]
        self.beside = kept(model)
        self.made = [None] * len(self.params)

    def _names(self) -> list[str]:
        return [v.path for v in self.variables]

    def _arrive(self, beside: Sequence[Tensor]) -> None:
        if "dismissed" in self.told:
            raise Dismissed(self.told["dismissed"])
        self.adapter.become(self.told)
        self._find()
        super()._arrive(beside)
        roll_dice(self.adapter.model, self.told["seed"], self.worker.index)

    def last_words(self, result: Any) -> dict[str, Any]:
        """As the chief: the result and the optimizer's state, for the other workers."""
        return {"result": result, "states": keras_recipe.states(self.optimizer, self.variables)}

    def _recipe(self) -> OptimizerRecipe:
        return keras_recipe.describe(self.optimizer, self.variables)

    def _states(self, plan: TrainingPlan) -> Mapping[int, Mapping[str, Any]]:
        return dict(enumerate(keras_recipe.states(self.optimizer, self.variables)))

    def _take_states(self, by_variable: Mapping[int, Mapping[str, Any]]) -> None:
        given = [by_variable.get(i, {}) for i in range(len(self.variables))]
        keras_recipe.restore(self.optimizer, self.variables, given)

    def _read_last(self) -> None:
        """The chief has read the weights already, and a callback may have changed them since."""

    def settings(self) -> list[dict[str, Any]]:
        return [{"config": keras_recipe.settings(self.optimizer)}]

    def _hook(self, index: int) -> Any:
        plain = super()._hook(index)

        def ready(param: Any) -> None:
            plain(param)
            self.made[index] = (id(param.grad), param.grad._version)

        return ready

    def added_up(self) -> None:
        """Note the gradients anew after the all-reduce between devices of this worker."""
        grads = [param.grad for param in self.params]
        self.made = [None if grad is None else (id(grad), grad._version) for grad in grads]

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self.made = [None] * len(self.params)


def overlay(adapter: KerasAdapter, apply: Callable[..., Any] | None) -> None:
    """Replace the optimizer's `apply`, and refuse that of others; None puts back their own."""
    for optimizer in adapter.optimizers:
        if apply is None:
            optimizer.__dict__.pop("apply", None)
        else:
            mine = optimizer is adapter.model.optimizer
            optimizer.__dict__["apply"] = apply if mine else _refuse_apply


def _refuse_apply(*args: Any, **kwargs: Any) -> None:
    raise NotDistributable(sentence("servers", "several optimizers"))


_SLOTS = (
    "train_step reads momenta or the like of its optimizer, which are on the servers; "
    "optimizer.iterations and learning_rate can be read there, all else with a MirroredStrategy."
)


@contextmanager
def slots_on_servers(optimizer: Any, custom: bool) -> Iterator[None]:
    """Within a `custom` step: refuse that the optimizer's slots are read."""
    settings = {id(optimizer._iterations), id(optimizer._learning_rate)}
    slots = [(v, type(v)) for v in optimizer.variables if custom and id(v) not in settings]
    kinds = {kind: type(kind.__name__, (kind,), {"value": property(_refuse)}) for _, kind in slots}
    for variable, kind in slots:
        variable.__class__ = kinds[kind]
    try:
        yield
    except (AttributeError, IndexError) as error:
        if custom and not optimizer.built:  # this worker never makes the slots
            error.add_note(f"If it is this: {_SLOTS}")
        raise
    finally:
        for variable, kind in slots:
            variable.__class__ = kind


def _refuse(_: Any) -> Any:
    raise NotDistributable(_SLOTS)


def refuse(model: Any) -> None:
    """Raise for an optimizer that servers cannot run, before workers are called."""
    variables = model.trainable_variables if model.built else []
    keras_recipe.describe(model.optimizer, variables)
    _clip_norm(model.optimizer)


def _clip_norm(optimizer: Any) -> float | None:
    """Return `global_clipnorm` in units of the servers' gradients, which have the loss scale."""
    limit = optimizer.global_clipnorm
    if not limit or limit <= 0:
        return None
    if optimizer.gradient_accumulation_steps:
        raise NotDistributable(
            "global_clipnorm clips what gradient_accumulation_steps have added up, of which each "
            "server has its share only; leave one of them out, or use clipnorm."
        )
    return float(limit) * float(optimizer.loss_scale_factor or 1.0)


def dismiss(worker: Client, served: Served, told: Any) -> None:
    """As the chief: open and finish a training that has no step."""
    number = worker.fits
    worker.fits += 1
    pieces = partition([(1,)], 4, served.servers, None)
    recipe = OptimizerRecipe("torch", "SGD", ({"lr": 0.0, "variables": [0]},))
    plan = TrainingPlan(
        ((1,),), "float32", pieces, recipe, served.updates, served.workers, served.servers
    )
    worker.open(number, plan, [torch.zeros(1)], None, [{"dismissed": told}, None, []])
    worker.finish([told, None])
