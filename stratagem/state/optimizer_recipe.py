"""An optimizer described by class and settings, sent to servers instead of a pickle.

    recipe = describe(torch.optim.Adam(model.parameters(), lr=0.1), params)
    recipe.to_json()
    {"library": "torch", "name": "Adam", "groups": [{"lr": 0.1, ..., "variables": [0, 1, 2]}]}

A server makes the optimizer of its own pieces of the variables with `build`.

An optimizer that treats every element by itself can step parts of a parameter with the result of
the whole. One that looks at a whole tensor (Adafactor's row and column means, Muon's
orthogonalisation) cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable, UsageError

#: optimizers whose parameters may be cut anywhere
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)

#: optimizers whose parameters may be cut between rows: also one for rows, and two whose step size
#: is state
ROW_WISE: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE,
    torch.optim.SparseAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


def check_elementwise(optimizer: Optimizer, placement: str) -> None:
    """Refuse an optimizer that may look at whole parameters, of which a process updates a part."""
    if type(optimizer) not in ELEMENTWISE:
        name = type(optimizer).__name__
        raise NotDistributable(
            sentence(placement, "optimizers of whole parameters", optimizer=name)
        )


#: torch's optimizers with fused CPU kernels, which update in one pass over memory
_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
_ADAGRAD = "initial_accumulator_value"
#: entries of a group that are no settings
_NOT_SETTINGS = {"params", "param_names", "variables"}


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer class of `library`, and each group's settings and variables."""

    library: str
    name: str
    groups: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        groups = [{k: _listed(v) for k, v in group.items()} for group in self.groups]
        return {"library": self.library, "name": self.name, "groups": groups}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OptimizerRecipe:
        """Read plain values; `build` refuses names that are no optimizer's."""
        groups = ({**settings_of(g), "variables": list(g["variables"])} for g in data["groups"])
        return cls(data["library"], data["name"], tuple(groups))


def describe(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> OptimizerRecipe:
    """Describe an optimizer for servers; variables are numbered as in `params`.

    Frozen parameters of the optimizer are left out.
    """
    name = type(optimizer).__name__
    if getattr(torch.optim, name, None) is not type(optimizer):
        raise NotDistributable(
            f"a parameter server builds its optimizer from torch.optim by name, and {name} is not "
            "there; use one of torch.optim's own classes."
        )
    if name == "LBFGS":
        raise NotDistributable(sentence("servers", "LBFGS"))
    numbers = {id(param): i for i, param in enumerate(params)}
    groups = []
    for group in optimizer.param_groups:
        if any(id(param) not in numbers and param.requires_grad for param in group["params"]):
            raise NotDistributable(
                f"{name} holds a parameter that is not one of the model's; give it the parameters "
                "of this model only."
            )
        variables = [numbers[id(param)] for param in group["params"] if id(param) in numbers]
        settings = settings_of(group)
        if name == "Adagrad":  # an argument of the class, not of groups
            settings[_ADAGRAD] = optimizer.defaults[_ADAGRAD]
        groups.append({**settings, "variables": variables})
    return OptimizerRecipe("torch", name, tuple(groups))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings as plain values: tuples for lists, numbers for tensors."""
    return {k: _plain(k, v) for k, v in group.items() if k not in _NOT_SETTINGS}


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, every value as it is."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def elementwise(recipe: OptimizerRecipe) -> bool:
    """Return whether pieces of a variable may be updated apart with the result of the whole."""
    if recipe.library == "keras":
        return bool(recipe.groups[0]["by_rows"])
    return any(recipe.name == c.__name__ for c in ROW_WISE)


def build(recipe: OptimizerRecipe, pieces: Sequence[tuple[int, Tensor]]) -> Optimizer:
    """Make the optimizer of one server's pieces, each a pair (variable, tensor).

    It has every group of the recipe, empty ones, too. A variable in no group is not updated.
    """
    kind = getattr(torch.optim, recipe.name, None) if recipe.name.isidentifier() else None
    if (
        not (isinstance(kind, type) and issubclass(kind, Optimizer))
        or kind is Optimizer
        or recipe.name == "LBFGS"
    ):
        raise UsageError(f"torch.optim has no optimizer {recipe.name!r} that a server can run.")
    groups = []
    for group in recipe.groups:
        inside = set(group["variables"])
        params = [tensor for variable, tensor in pieces if variable in inside]
        groups.append({**tuned(recipe.name, settings_of(group), params), "params": params})
    first = recipe.groups[0] if recipe.groups else {}
    arguments = {_ADAGRAD: first[_ADAGRAD]} if _ADAGRAD in first else {}
    optimizer: Optimizer = kind(groups, **arguments)
    return optimizer


def tuned(name: str, settings: dict[str, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """Return the settings as a server uses them: with fused kernels where these are exact.

    In bfloat16 they are not: a fused kernel rounds less often than the plain one.
    """
    settings = dict(settings)
    for flag in ("differentiable", "capturable"):  # they concern the user's loop only
        if flag in settings:
            settings[flag] = False
    plain = settings.get("fused") is None and settings.get("foreach") is None
    if name in _FUSED and plain:
        exact = all(p.device.type == "cpu" and p.dtype is torch.float32 for p in params)
        settings["fused"] = True if exact else None
    return settings


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(name, v) for v in value)
    raise NotDistributable(
        f"the optimizer's setting {name!r} is a {type(value).__name__}, which cannot be sent to a "
        "parameter server; use numbers, strings, or lists of them."
    )


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value
