"""Optimizers described by class and settings, and built from that."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.errors import NotDistributable, UsageError
from stratagem.state.optimizer_recipe import OptimizerRecipe, build, describe, elementwise

NAMES = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
]


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes or [(3, 2), (2, 2)]]


def travelled(recipe: OptimizerRecipe) -> OptimizerRecipe:
    return OptimizerRecipe.from_json(json.loads(json.dumps(recipe.to_json())))


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_travels(name: str) -> None:
    own = params()
    optimizer = getattr(torch.optim, name)(own, lr=0.3)
    recipe = describe(optimizer, own)
    assert travelled(recipe) == recipe and recipe.library == "torch"
    (built,) = build(recipe, [(i, p.detach()) for i, p in enumerate(own)]).param_groups
    (before,) = optimizer.param_groups
    for key in before.keys() - {"params", "fused"}:
        assert built[key] == before[key] and type(built[key]) is type(before[key]), key


def test_groups_and_their_variables() -> None:
    a, b, c = own = params((2,), (3,), (4,))
    optimizer = torch.optim.SGD(
        [{"params": [c], "lr": torch.tensor(0.5)}, {"params": [a], "momentum": 0.9}], lr=0.1
    )
    recipe = travelled(describe(optimizer, own))
    assert [group["variables"] for group in recipe.groups] == [[2], [0]]
    assert [type(group["lr"]) for group in recipe.groups] == [float, float]
    whole, rows = c.detach()[:2], c.detach()[2:]
    built = build(recipe, [(2, whole), (1, b.detach()), (2, rows)])
    assert [len(group["params"]) for group in built.param_groups] == [2, 0]
    assert built.param_groups[0]["params"][1] is rows
    assert [group["momentum"] for group in built.param_groups] == [0, 0.9]


def test_names_and_tensors_in_the_settings() -> None:
    module = nn.Linear(2, 2)
    betas = torch.tensor(0.5), torch.tensor(0.75)
    optimizer = torch.optim.Adam(module.named_parameters(), betas=betas)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (group,) = travelled(describe(optimizer, list(module.parameters()))).groups
    assert group["betas"] == (0.5, 0.75) and "param_names" not in group
    assert group["initial_lr"] == 1e-3


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_where_it_is_exact(name: str) -> None:
    def fused(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        own = params(dtype=dtype)
        recipe = describe(getattr(torch.optim, name)(own, lr=0.1, **settings), own)
        (group,) = build(recipe, [(i, p.detach()) for i, p in enumerate(own)]).param_groups
        return group["fused"]

    assert fused() is True
    assert fused(fused=False) is False
    assert fused(foreach=True) is None
    assert fused(torch.bfloat16) is None


def test_adagrad_begins_where_the_user_said() -> None:
    (own,) = params((2,))
    recipe = describe(torch.optim.Adagrad([own], initial_accumulator_value=0.5), [own])
    built = build(travelled(recipe), [(0, own.detach())])
    (state,) = built.state.values()
    assert state["sum"].tolist() == [0.5, 0.5]


def test_what_may_be_cut() -> None:
    def of(name: str) -> bool:
        return elementwise(OptimizerRecipe("torch", name, ()))

    assert {name for name in NAMES if not of(name)} == {"Adafactor", "Muon"}
    assert not of("LBFGS")


class Own(torch.optim.SGD):
    """Not torch's own."""


def test_what_cannot_be_described() -> None:
    own = params()
    with pytest.raises(NotDistributable, match="Own is not there"):
        describe(Own(own), own)
    with pytest.raises(NotDistributable, match="LBFGS"):
        describe(torch.optim.LBFGS(own), own)
    with pytest.raises(NotDistributable, match="not one of the model's"):
        describe(torch.optim.SGD(own), own[:1])
    odd = torch.optim.SGD(own)
    odd.param_groups[0]["callback"] = print
    with pytest.raises(NotDistributable, match="'callback'"):
        describe(odd, own)


@pytest.mark.parametrize(
    "name", ["Optimizer", "LBFGS", "lr_scheduler", "swa_utils", "__class__", "os.system", "Nope"]
)
def test_only_optimizers_are_built(name: str) -> None:
    with pytest.raises(UsageError, match="no optimizer"):
        build(OptimizerRecipe("torch", name, ({"lr": 0.1, "variables": []},)), [])


def test_dictionaries_are_no_settings() -> None:
    group = {"variables": [0], "lr": {"a": 1}}
    with pytest.raises(NotDistributable, match="'lr'"):
        OptimizerRecipe.from_json({"library": "torch", "name": "SGD", "groups": [group]})
