"""A scene played twice, plainly on one device and in a strategy's scope, must end alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from tests.keras_support import strategy
from tests.spread import assert_work, watched

Scope = Callable[[], AbstractContextManager[Any]]


def both(
    play: Callable[[Scope], Any],
    replicas: int = 2,
    tolerance: float = 1e-5,
    *,
    shared: bool = True,
    moves: bool = True,
) -> Any:
    """Plays with no scope, then with one; returns what the distributed scene returned.

    Every replica must have computed rows, unless the scene is not `shared`, and weights must have
    moved, unless it `moves` none.
    """

    def seeded(scope: Scope) -> Any:
        keras.utils.set_random_seed(7)
        return play(scope)

    where = strategy(replicas)
    expected, alone = watched(lambda: seeded(nullcontext))
    found, spread = watched(lambda: seeded(where.scope), where)
    alike(expected, found, tolerance)
    assert_work(alone, spread, shared=shared, moves=moves)
    return found


def alike(expected: Any, found: Any, tolerance: float = 1e-5) -> None:
    ours, theirs = keras.tree.flatten(expected), keras.tree.flatten(found)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, str | bool) or a is None:
            assert a == b
        else:
            a, b = np.asarray(a), np.asarray(b)
            assert a.shape == b.shape
            np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


def mlp(**more: Any) -> Any:
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)]
    )


def compiled(scope: Scope, build: Callable[[], Any] = mlp, **compile: Any) -> Any:
    options = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    } | compile
    with scope():
        model = build()
        model.compile(**options)
    return model


def outcome(model: Any, history: Any = None) -> Any:
    """What both must agree on."""
    return [model.get_weights(), dict(history.history) if history is not None else {}]
