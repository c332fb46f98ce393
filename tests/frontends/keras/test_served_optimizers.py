"""Keras' optimizers over pieces of variables: the very numbers of Keras on whole ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import pytest
import torch
from keras import layers, optimizers
from keras.optimizers import schedules

from stratagem.errors import NotDistributable, UsageError
from stratagem.state import keras_recipe
from stratagem.state.optimizer_recipe import OptimizerRecipe, elementwise
from stratagem.state.partition import (
    FixedShards,
    assemble,
    assemble_values,
    cut,
    cut_values,
    partition,
)
from stratagem.state.store import Store

MAKE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "lion": lambda: optimizers.Lion(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "schedule": lambda: optimizers.Adam(schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0])),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulated": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3),
    "decay and scale": lambda: optimizers.SGD(0.1, weight_decay=0.1, loss_scale_factor=4.0),
}
NEWER = {"muon": "Muon", "schedule-free": "ScheduleFreeAdamW"}
MAKE |= {
    name: lambda kind=kind: getattr(optimizers, kind)(0.01)  # type: ignore[misc]
    for name, kind in NEWER.items()
    if hasattr(optimizers, kind)
}


def variables(constraint: Any = None) -> list[Any]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(7, kernel_constraint=constraint), layers.Dense(3)]
    )
    return list(model.trainable_variables)


def described(optimizer: Any, given: list[Any]) -> OptimizerRecipe:
    """As a server gets it."""
    plain = json.loads(json.dumps(keras_recipe.describe(optimizer, given).to_json()))
    return OptimizerRecipe.from_json(plain)


class Servers:
    """Several stores with all pieces of some variables."""

    def __init__(self, optimizer: Any, given: list[Any], count: int) -> None:
        self.given, self.shapes = given, [tuple(v.shape) for v in given]
        recipe = described(optimizer, given)
        pieces = partition(self.shapes, 4, count, FixedShards(2), whole=not elementwise(recipe))
        self.parts = [[p for p in pieces if p.server == k] for k in range(count)]
        self.stores = [Store(part, self.shapes, torch.float32, recipe) for part in self.parts]
        whole = dict(enumerate(keras_recipe.states(optimizer, given)))
        values = [v.value.detach() for v in given]
        for store, part in zip(self.stores, self.parts, strict=True):
            store.restore(cut_values(values, part), cut(whole, part, self.shapes))

    def step(self, grads: list[Any], rate: float = 1.0, unused: int | None = None) -> None:
        for store, part in zip(self.stores, self.parts, strict=True):
            flat = cut_values(grads, part).clone()
            used = None if unused is None else [p.variable != unused for p in part]
            if used is not None:
                flat = cut_values(grads, [p for p in part if p.variable != unused])
            store.apply_one(flat.clone(), 1.0, used, rate)

    def values(self) -> list[Any]:
        placed = [p for part in self.parts for p in part]
        values = {k: store.values for k, store in enumerate(self.stores)}
        return assemble_values(placed, values, self.shapes)

    def take_back(self, optimizer: Any) -> None:
        placed = [p for part in self.parts for p in part]
        states = [s for store in self.stores for s in store.snapshot().states]
        whole = assemble(placed, states, self.shapes)
        keras_recipe.restore(optimizer, self.given, [whole[i] for i in range(len(self.shapes))])


def apart(ours: list[Any], theirs: list[Any]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", MAKE)
def test_servers_make_the_step_of_keras(name: str, count: int) -> None:
    """Values and state after some steps, of variables with a constraint on whole ones."""
    alone, given = variables(), variables()
    plain, told = MAKE[name](), MAKE[name]()
    plain.build(alone)
    told.build(given)
    servers = Servers(told, given, count)
    dice = torch.Generator().manual_seed(0)
    for _ in range(7):
        grads = [0.3 * torch.randn(shape, generator=dice) for shape in servers.shapes]
        with torch.no_grad():
            plain.apply([g.clone() for g in grads], alone)
        servers.step(grads)
    assert apart([v.value.detach() for v in alone], servers.values()) < 5e-6
    servers.take_back(told)
    ours = [v.value.detach() for v in plain.variables]
    assert apart(ours, [v.value.detach() for v in told.variables]) < 1e-6


def test_pieces_are_whole_where_the_step_looks_at_all_of_a_variable() -> None:
    given = variables()
    for make, by_rows in [
        (lambda: optimizers.Adam(), True),
        (lambda: optimizers.Lamb(), False),
        (lambda: optimizers.SGD(clipnorm=1.0), False),
    ]:
        assert elementwise(described(make(), given)) is by_rows
    assert not elementwise(described(optimizers.Adam(), variables("max_norm")))


def test_constraints_hold_on_the_server() -> None:
    given = variables(keras.constraints.MaxNorm(0.1))
    optimizer = optimizers.SGD(1.0)
    optimizer.build(given)
    servers = Servers(optimizer, given, 2)
    servers.step([torch.ones(shape) for shape in servers.shapes])
    assert float(servers.values()[0].norm(dim=0).max()) <= 0.1 + 1e-6
    assert float(servers.values()[2].norm(dim=0).max()) > 0.1


def test_a_variable_that_was_not_used_stays_and_the_step_counts() -> None:
    alone, given = variables(), variables()
    plain, told = optimizers.SGD(0.1, momentum=0.9), optimizers.SGD(0.1, momentum=0.9)
    plain.build(alone)
    told.build(given)
    servers = Servers(told, given, 5)
    ones = [torch.ones(shape) for shape in servers.shapes]
    for unused in (0, None, 0):
        grads = [None if i == unused else g.clone() for i, g in enumerate(ones)]
        with torch.no_grad(), pytest.warns() if unused is not None else torch.no_grad():
            plain.apply(grads, alone)
        servers.step(ones, unused=unused)
    assert apart([v.value.detach() for v in alone], servers.values()) < 1e-7
    servers.take_back(told)
    assert int(told.iterations) == 3


@pytest.mark.parametrize("name", ["sgd", "adam", "schedule", "adafactor"])
def test_a_lower_rate_for_one_step(name: str) -> None:
    given = variables()
    optimizer = MAKE[name]()
    optimizer.build(given)
    whole, half = Servers(optimizer, given, 1), Servers(optimizer, given, 1)
    before = torch.cat([v.value.detach().flatten() for v in given])
    grads = [torch.ones(shape) for shape in whole.shapes]
    moved = []
    for servers, rate in ((whole, 1.0), (half, 0.5)):
        servers.step(grads, rate)
        moved.append(torch.cat([v.flatten() for v in servers.values()]) - before)
    assert torch.allclose(moved[1], moved[0] / 2, atol=1e-6) and moved[0].abs().max() > 1e-4


def test_settings_follow() -> None:
    given = variables()
    optimizer = optimizers.SGD(0.1)
    optimizer.build(given)
    servers = Servers(optimizer, given, 1)
    optimizer.learning_rate = 0.5
    optimizer.clipvalue = 0.1
    servers.stores[0].set_settings([{"config": keras_recipe.settings(optimizer)}])
    before = servers.values()
    servers.step([torch.ones(shape) for shape in servers.shapes])
    assert apart([v - 0.05 for v in before], servers.values()) < 1e-6


class Mine(optimizers.SGD):
    pass


@pytest.mark.parametrize(
    "recipe",
    [
        ("os", {}),
        ("Optimizer", {}),
        ("LossScaleOptimizer", {}),
        ("get", {}),
        ("SGD.__init__", {}),
        ("SGD", {"learning_rate": {"name": "deserialize", "config": {}}}),
        ("SGD", {"learning_rate": {"name": "LearningRateSchedule", "config": {}}}),
    ],
    ids=str,
)
def test_a_server_makes_nothing_but_keras_own(recipe: Any) -> None:
    name, config = recipe
    group = {
        "config": json.dumps({"learning_rate": 0.1, **config}),
        "about": json.dumps({"paths": ["a"], "constraints": [None], "decays": [True]}),
        "by_rows": True,
        "variables": [0],
    }
    told = OptimizerRecipe.from_json({"library": "keras", "name": name, "groups": [group]})
    with pytest.raises(UsageError, match="server can"):
        Store(partition([(2,)], 4, 1), [(2,)], torch.float32, told)


def test_constraints_come_from_keras_alone() -> None:
    group = {
        "config": json.dumps({"learning_rate": 0.1}),
        "about": json.dumps(
            {"paths": ["a"], "constraints": [{"name": "get", "config": {}}], "decays": [True]}
        ),
        "by_rows": False,
        "variables": [0],
    }
    told = OptimizerRecipe.from_json({"library": "keras", "name": "SGD", "groups": [group]})
    with pytest.raises(UsageError, match="server can"):
        Store(partition([(2,)], 4, 1), [(2,)], torch.float32, told)


def test_what_a_server_cannot_make_is_not_described() -> None:
    given = variables()
    for optimizer in (
        Mine(),
        optimizers.SGD(lambda: 0.1),
        optimizers.LossScaleOptimizer(optimizers.SGD()),
    ):
        with pytest.raises(NotDistributable):
            keras_recipe.describe(optimizer, given)
    with pytest.raises(NotDistributable, match="constraint"):
        keras_recipe.describe(optimizers.SGD(), variables(lambda w: w))
