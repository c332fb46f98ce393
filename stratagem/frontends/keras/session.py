"""A training of a Keras model with parameter servers, on one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.frontends.keras import attributes, environment
from stratagem.frontends.keras.user_metrics import user_metrics
from stratagem.state import keras_recipe
from stratagem.state.partition import partition
from stratagem.state.recipe import OptimizerRecipe
from stratagem.strategies.parameters.plan import Clip, Plan
from stratagem.strategies.parameters.session import Session
from stratagem.strategies.parameters.worker import Worker
from stratagem.strategies.settings import Served, Settings


class Dismissed(Exception):
    """The training was over before it began; `told` is what the chief says of it."""

    def __init__(self, told: Any) -> None:
        super().__init__("a training without a step")
        self.told = told


class KerasSession(Session):
    """Keras' variables and optimizer where others have torch's.

    `told` is what the chief tells the others, so that their models become like its own.
    """

    def __init__(
        self, worker: Worker, model: Any, settings: Settings, device: torch.device,
        told: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.device = model, device
        #: by variable: the gradient that backward made, and how often it had been written to
        self.made: list[tuple[int, int] | None] = []
        assert settings.served is not None
        super().__init__(
            worker, model, model.optimizer, settings.served, wire=settings.wire,
            clip=Clip(_clip_norm(model.optimizer), margin=0.0), told=told,
        )  # fmt: skip

    def _find(self) -> None:
        self.params, self.beside = [], []
        if not self.model.built:
            return  # it is built from the chief's first example
        self.variables = list(self.model.trainable_variables)
        if not self.variables:
            raise NotDistributable(
                "the model has no trainable weights, so there is nothing to train on several "
                "workers; set layer.trainable = True somewhere."
            )
        environment.move([*self.model.variables, *self.model.metrics_variables], self.device)
        self.params = [v.value for v in self.variables]
        self.beside = environment.kept(self.model)
        self.made = [None] * len(self.params)

    def _arrive(self, beside: Sequence[Tensor]) -> None:
        model, told = self.model, self.told
        if "dismissed" in told:
            raise Dismissed(told["dismissed"])
        become_like(model, told)
        self._find()
        super()._arrive(beside)
        environment.own_dice(model, told["seed"], self.worker.index)

    def last_words(self, result: Any) -> dict[str, Any]:
        """As the chief: what the others need besides the weights."""
        return {"result": result, "states": keras_recipe.states(self.optimizer, self.variables)}

    def _recipe(self) -> OptimizerRecipe:
        return keras_recipe.describe(self.optimizer, self.variables)

    def _states(self, plan: Plan) -> Mapping[int, Mapping[str, Any]]:
        return dict(enumerate(keras_recipe.states(self.optimizer, self.variables)))

    def _take_states(self, by_variable: Mapping[int, Mapping[str, Any]]) -> None:
        given = [by_variable.get(i, {}) for i in range(len(self.variables))]
        keras_recipe.restore(self.optimizer, self.variables, given)

    def _read_last(self) -> None:
        """It is here, and a callback may have changed it since."""

    def settings(self) -> list[dict[str, Any]]:
        return [{"config": keras_recipe.settings(self.optimizer)}]

    def _hook(self, index: int) -> Any:
        plain = super()._hook(index)

        def ready(param: Any) -> None:
            plain(param)
            self.made[index] = (id(param.grad), param.grad._version)

        return ready

    def added_up(self) -> None:
        """Several devices have added up their gradients: what they have now is backward's."""
        self.worker.memory.take_all()
        grads = [param.grad for param in self.params]
        self.made = [None if grad is None else (id(grad), grad._version) for grad in grads]

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self.made = [None] * len(self.params)


def become_like(model: Any, told: dict[str, Any]) -> None:
    """Have a model be as the chief's, but for its values."""
    if not model.built:
        with torch.no_grad():
            model(keras.utils.unpack_x_y_sample_weight(told["example"])[0])
        model._track_variables()  # a build of the user's own may come too late
    for variable, wanted in zip(model.weights, told["trainable"], strict=True):
        if variable.trainable != wanted:
            variable.trainable = wanted
    attributes.follow(model, told["attributes"])
    type(model).reset_metrics(model)  # the copy came with what the chief had counted
    for metric in user_metrics(model):
        metric.reset_state()


def refuse(model: Any) -> None:
    """One sentence for an optimizer that servers cannot run, before anybody is asked to work."""
    variables = model.trainable_variables if model.built else []
    keras_recipe.describe(model.optimizer, variables)
    _clip_norm(model.optimizer)


def _clip_norm(optimizer: Any) -> float | None:
    """The limit of the whole gradient's norm, as gradients come to the servers: scaled."""
    limit = optimizer.global_clipnorm
    if not limit or limit <= 0:
        return None
    if optimizer.gradient_accumulation_steps:
        raise NotDistributable(
            "global_clipnorm clips what gradient_accumulation_steps have added up, of which each "
            "server has its share only; leave one of them out, or use clipnorm."
        )
    return float(limit) * float(optimizer.loss_scale_factor or 1.0)


def dismiss(worker: Worker, served: Served, told: Any) -> None:
    """As the chief: a training without a single step is over before it begins."""
    number = worker.fits
    worker.fits += 1
    pieces = partition([(1,)], 4, served.servers, None)
    recipe = OptimizerRecipe("torch", "SGD", ({"lr": 0.0, "variables": [0]},))
    plan = Plan(((1,),), "float32", pieces, recipe, served.updates, served.workers, served.servers)
    worker.open(number, plan, [torch.zeros(1)], None, [{"dismissed": told}, None, []])
    worker.finish([told, None])
