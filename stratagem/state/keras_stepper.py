"""A Keras optimizer over the pieces of parameters that one server has.

Keras' Adam is replaced by torch's fused kernel, with one pass over memory instead of nine. Keras
adds epsilon to the root of the uncorrected second moment, torch to that of the corrected one, so
the kernel takes epsilon / sqrt(1 - beta_2^t) for the same step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.compat.torch_names import fused_adam
from stratagem.errors import UsageError
from stratagem.state import keras_recipe
from stratagem.state.optimizer_recipe import OptimizerRecipe

STEP = "_parallel_update_step"


def fuse(optimizer: Any) -> None:
    """Replace the optimizer's step by torch's fused kernel, if it is Keras' Adam or AdamW."""
    of_keras = type(optimizer).__module__.startswith("keras.")
    adam = isinstance(optimizer, keras.optimizers.Adam)  # AdamW too: it decays before
    if of_keras and adam and not optimizer.amsgrad and hasattr(optimizer, STEP):
        optimizer.__dict__[STEP] = _fused_step(optimizer)


def _fused_step(optimizer: Any) -> Callable[..., None]:
    plain = getattr(type(optimizer), STEP).__get__(optimizer)

    def step(grads: list[Any], variables: list[Any], learning_rate: Any) -> None:
        tensors = [v.value for v in variables]
        if not is_plain(tensors) or not is_plain(grads):
            plain(grads, variables, learning_rate)
            return
        places = [optimizer._get_variable_index(v) for v in variables]
        first = [optimizer._momentums[i].value for i in places]
        second = [optimizer._velocities[i].value for i in places]
        time = int(optimizer.iterations) + 1
        times = [torch.tensor(float(time), device=tensors[0].device)] * len(places)
        fused_step_of(
            optimizer, (tensors, grads, first, second, [], times), float(learning_rate), time
        )

    return step


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether the fused step takes these tensors: dense contiguous float32 on one device."""
    return all(
        t is not None
        and t.dtype is torch.float32
        and t.layout is torch.strided
        and t.is_contiguous()
        and t.device == tensors[0].device
        for t in tensors
    )


def fused_step_of(optimizer: Any, lists: Any, rate: float, time: int) -> None:
    """Make Adam's step number `time`; `lists`: weights, gradients, both moments, [], times."""
    fused_adam(
        *lists,
        lr=rate,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        weight_decay=0.0,
        eps=epsilon_of(optimizer, time),
        amsgrad=False,
        maximize=False,
    )


def epsilon_of(optimizer: Any, time: int) -> float:
    """Return torch's epsilon for Keras' in the step number `time`."""
    return float(optimizer.epsilon / math.sqrt(1 - optimizer.beta_2**time))


#: optimizers whose step is not proportional to the learning rate
_OWN_RATE = {"Adafactor"}
#: settings that are sent otherwise, or that only name variables
_NOT_FOLLOWED = {"learning_rate", "name"}


class KerasStepper:
    """A `Stepper` with a Keras optimizer, over (variable, tensor) pieces that are views of
    `values`."""

    def rows_only(self, piece: int) -> bool:
        return False

    def __init__(
        self, recipe: OptimizerRecipe, pieces: Sequence[tuple[int, Tensor]], values: Tensor
    ) -> None:
        if keras.config.backend() != "torch":
            raise UsageError(
                f"Keras runs on {keras.config.backend()} in this ps task; set KERAS_BACKEND=torch "
                "in its environment."
            )
        self.values, self._recipe = values, recipe
        device = values.device
        self._device = "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
        about = json.loads(recipe.groups[0]["about"])
        home = keras.constraints
        self._config: str = recipe.groups[0]["config"]
        with keras.device(self._device):
            self._variables = [
                keras_recipe.value_of(
                    tensor,
                    about["paths"][i],
                    keras_recipe.made(about["constraints"][i], home, home.Constraint),
                )
                for i, tensor in pieces
            ]
            self.optimizer = keras_recipe.make(recipe)
            self.optimizer.build(self._variables)
        decaying = {
            id(v) for v, (i, _) in zip(self._variables, pieces, strict=True) if about["decays"][i]
        }
        plain = self.optimizer._apply_weight_decay

        def decay(variables: Sequence[Any]) -> None:
            if chosen := [v for v in variables if id(v) in decaying]:
                plain(chosen)

        self.optimizer.__dict__["_apply_weight_decay"] = decay
        fuse(self.optimizer)

    def step(self, grads: Sequence[Tensor | None], rate: float) -> dict[int, Tensor | None]:
        """Make a step; returns the pieces that were updated."""
        given = [
            (_dense(grad, v.value), v)
            for grad, v in zip(grads, self._variables, strict=True)
            if grad is not None
        ]
        optimizer = self.optimizer
        with keras.device(self._device), self._rate(rate):
            if given:
                optimizer.apply([grad for grad, _ in given], [v for _, v in given])
            else:
                self._idle()
        everything = optimizer.use_ema
        return {i: None for i, grad in enumerate(grads) if everything or grad is not None}

    def _idle(self) -> None:
        """Count a step without gradients, and update moving averages of weights."""
        optimizer = self.optimizer
        if optimizer.use_ema:
            optimizer._update_model_variables_moving_average(self._variables)
            every = optimizer.ema_overwrite_frequency
            if every and (int(optimizer.iterations) + 1) % every == 0:
                optimizer._overwrite_model_variables_with_average_value(self._variables)
        optimizer._iterations.assign_add(1)

    @contextmanager
    def _rate(self, rate: float) -> Iterator[None]:
        """Another learning rate, for this step only."""
        if rate == 1.0:
            yield
        elif self._recipe.name in _OWN_RATE:
            before = self.values.clone()
            yield
            self.values.copy_(before.lerp_(self.values, rate))
        else:
            plain = self.optimizer._get_current_learning_rate
            self.optimizer.__dict__["_get_current_learning_rate"] = lambda: plain() * rate
            try:
                yield
            finally:
                del self.optimizer.__dict__["_get_current_learning_rate"]

    # --- settings and state ---------------------------------------------------------------------

    def settings(self) -> list[dict[str, Any]]:
        return [{"config": self._config}]

    def set_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        (group,) = groups
        if group["config"] == self._config:
            return
        before = keras_recipe.read_settings(self._config)
        self._config = str(group["config"])
        config = keras_recipe.read_settings(self._config)
        if config["learning_rate"] != before["learning_rate"]:
            self.optimizer.learning_rate = keras_recipe.made_rate(config["learning_rate"])
        for name, value in config.items():
            if name not in _NOT_FOLLOWED and value != before.get(name):
                setattr(self.optimizer, name, value)

    def states(self) -> list[dict[str, Any]]:
        """Return a copy of the state of every piece."""
        return keras_recipe.states(self.optimizer, self._variables)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of all pieces."""
        if len(states) != len(self._variables):
            raise UsageError(f"states of {len(states)} pieces for {len(self._variables)}.")
        keras_recipe.restore(self.optimizer, self._variables, states)


def _dense(grad: Tensor, like: Tensor) -> Tensor:
    return (grad.to_dense() if grad.is_sparse else grad).to(like.dtype).contiguous()
