"""A Keras optimizer as class and settings, and its state by variable: what travels to a server.

Everything is plain values. A server looks names up in keras.optimizers, its schedules, and
keras.constraints, and nowhere else; nothing that comes over a wire is imported or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.errors import NotDistributable, UsageError
from stratagem.state.optimizer_recipe import OptimizerRecipe

State = dict[str, Any]
#: optimizers that update every element by itself, so that a variable may be cut between rows
_BY_ROWS = {
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Nadam",
    "Lion",
    "Ftrl",
}
_WRAPPERS = {"LossScaleOptimizer", "MultiOptimizer"}
#: lists of an optimizer that are no state by variable
_NO_SLOTS = {"_variables", "_trainable_variables"}
#: variables that are settings, and sent as such
_NO_STATE = {"_learning_rate"}


# --- class and settings -----------------------------------------------------------------------


def describe(optimizer: Any, variables: Sequence[Any]) -> OptimizerRecipe:
    """Describe an optimizer of these variables, for servers to make one like it."""
    name = _public_name(optimizer)
    if any(getattr(v, "overwrite_with_gradient", False) for v in variables):
        raise NotDistributable(
            "the model has variables that are overwritten with their gradients (float8 training), "
            "which parameter servers cannot average; use another dtype policy."
        )
    constraints = [_named(v.constraint, keras.constraints, "constraint") for v in variables]
    about = {
        "paths": [v.path for v in variables],
        "constraints": constraints,
        "decays": [bool(optimizer._use_weight_decay(v)) for v in variables],
    }
    by_rows = name in _BY_ROWS and not optimizer.clipnorm and not any(constraints)
    group = {
        "config": settings(optimizer),
        "about": json.dumps(about),
        "by_rows": by_rows,
        "variables": list(range(len(variables))),
    }
    return OptimizerRecipe("keras", name, (group,))


def _public_name(optimizer: Any) -> str:
    kind = type(optimizer)
    public = getattr(keras.optimizers, kind.__name__, None)
    own = isinstance(public, type) and issubclass(kind, public)
    if not own or not kind.__module__.startswith("keras."):
        raise NotDistributable(
            f"a parameter server builds its optimizer from keras.optimizers by name, and "
            f"{kind.__name__} is not there; use one of Keras' own classes."
        )
    if kind.__name__ in _WRAPPERS:
        raise NotDistributable(
            f"{kind.__name__} decides over several optimizers or losses at once, which parameter "
            "servers do not follow; use a plain optimizer (and mixed_bfloat16, not mixed_float16)."
        )
    return kind.__name__


def settings(optimizer: Any) -> str:
    """Return the config in JSON; a schedule of the learning rate by its public name."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):  # it may have no config
        _named(rate, keras.optimizers.schedules, "schedule of the learning rate")
    config = dict(optimizer.get_config())
    rate = config["learning_rate"]
    if isinstance(rate, dict):
        config["learning_rate"] = _named(
            optimizer._learning_rate, keras.optimizers.schedules, "schedule of the learning rate"
        )
    try:
        return json.dumps(config)
    except TypeError as problem:
        raise NotDistributable(
            f"a setting of {type(optimizer).__name__} cannot be sent to a parameter server "
            f"({problem}); use numbers, strings, or lists of them."
        ) from problem


def _named(thing: Any, home: Any, what: str) -> dict[str, Any] | None:
    """Describe an object of Keras by its public name and config."""
    if thing is None:
        return None
    kind = type(thing)
    if getattr(home, kind.__name__, None) is not kind:
        raise NotDistributable(
            f"a parameter server builds each {what} from {home.__name__} by name, and "
            f"{getattr(thing, '__name__', kind.__name__)} is not there; use one of Keras' own."
        )
    return {"name": kind.__name__, "config": thing.get_config()}


def make(recipe: OptimizerRecipe) -> Any:
    """Make the optimizer of a recipe, not built yet."""
    kind = _found(keras.optimizers, recipe.name, keras.optimizers.Optimizer)
    if recipe.name in _WRAPPERS:
        raise UsageError(f"{recipe.name} is no optimizer that a server can run.")
    config = read_settings(recipe.groups[0]["config"])
    config["learning_rate"] = made_rate(config["learning_rate"])
    return kind(**config)


def read_settings(text: str) -> dict[str, Any]:
    """Read the config without clipping by the global norm, which the coordinator does: a server
    sees a share of the gradient."""
    config: dict[str, Any] = json.loads(text)
    config.pop("global_clipnorm", None)
    return config


def made_rate(rate: Any) -> Any:
    """Return a learning rate as the optimizer takes it."""
    if not isinstance(rate, dict):
        return rate
    home = keras.optimizers.schedules
    return made(rate, home, home.LearningRateSchedule)


def made(facts: Mapping[str, Any] | None, home: Any, base: Any) -> Any:
    """Make an object that `_named` has described."""
    return None if facts is None else _found(home, facts["name"], base)(**facts["config"])


def _found(home: Any, name: Any, base: Any) -> Any:
    found = getattr(home, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, base)) or found is base:
        raise UsageError(f"{home.__name__} has no {name!r} that a server can use.")
    return found


# --- state ------------------------------------------------------------------------------------


def states(optimizer: Any, variables: Sequence[Any]) -> list[State]:
    """Return a copy of the optimizer's state by variable, each with the counters."""
    slots, scalars = _kept(optimizer)
    common: State = {name: variable.value.detach().clone() for name, variable in scalars.items()}
    common["step"] = int(scalars["_iterations"].value)
    found = []
    for variable in variables:
        i = optimizer._get_variable_index(variable)
        own = {
            name: slot[i].value.detach().clone()
            for name, slot in slots.items()
            if slot[i] is not None
        }
        found.append({**common, **own})
    return found


@torch.no_grad()
def restore(optimizer: Any, variables: Sequence[Any], given: Sequence[Mapping[str, Any]]) -> None:
    """Load such copies; a variable without one keeps its state."""
    slots, scalars = _kept(optimizer)
    for variable, state in zip(variables, given, strict=True):
        i = optimizer._get_variable_index(variable)
        for name, value in state.items():
            if name in slots and slots[name][i] is not None:
                slots[name][i].value.copy_(value)
            elif name in scalars:
                scalars[name].value.copy_(value)


def _kept(optimizer: Any) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return the lists with a state for each variable, and the counters."""
    count = len(optimizer._trainable_variables)
    slots: dict[str, list[Any]] = {}
    scalars: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, keras.Variable):
            scalars[name] = value
        elif (
            isinstance(value, list)
            and len(value) == count
            and name not in _NO_SLOTS
            and any(isinstance(each, keras.Variable) for each in value)
        ):
            slots[name] = value
    known = {id(v) for v in scalars.values()}
    known |= {id(v) for slot in slots.values() for v in slot}
    if lost := [v.path for v in optimizer.variables if id(v) not in known]:
        raise NotDistributable(
            f"{type(optimizer).__name__} keeps {', '.join(lost)} beside what it keeps for each "
            "variable, which servers that hold some of the variables cannot; use another optimizer."
        )
    return slots, {name: v for name, v in scalars.items() if name not in _NO_STATE}


def value_of(tensor: Tensor, path: str, constraint: Any) -> Any:
    """Make a Keras variable in the tensor's memory."""
    *scopes, name = path.split("/")
    if scopes:
        with keras.name_scope(scopes[0]):
            return value_of(tensor, "/".join([*scopes[1:], name]), constraint)
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    variable = keras.Variable(parameter, trainable=True, name=name)
    variable.constraint = constraint
    return variable
