"""Keras models trained twice: plainly on one device, and in a strategy's scope."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import keras
import numpy as np

import stratagem as sg
from tests.support import cpus

Build = Callable[[], Any]


_made: list[sg.MirroredStrategy] = []


@cache
def strategy(count: int, **options: Any) -> sg.MirroredStrategy:
    """One team for all tests that need nothing else; they also show that it can be used again."""
    _made.append(sg.MirroredStrategy(cpus(count), **options))
    return _made[-1]


def close_all() -> None:
    """End every team: a test elsewhere kills the process that they were forked from."""
    for each in _made:
        each.close()


def train(
    build: Build,
    compile: Callable[[], dict[str, Any]],
    fit: dict[str, Any],
    where: sg.Strategy | None = None,
) -> tuple[Any, dict[str, list[float]]]:
    """A model trained from one seed, and its history."""
    keras.utils.set_random_seed(7)
    with where.scope() if where is not None else nullcontext():
        model = build()
        model.compile(**compile())
    history = model.fit(verbose=0, **fit)
    return model, history.history


def apart(a: Any, b: Any) -> float:
    """The largest difference between two models' weights."""
    ours, theirs = a.get_weights(), b.get_weights()
    assert [w.shape for w in ours] == [w.shape for w in theirs]
    return max(float(np.abs(x - y).max()) for x, y in zip(ours, theirs, strict=True))


BOOKS = {
    "updates",
    "dropped",
    "waiting",
    "staleness",
    "staleness_histogram",
    "waiting_by_worker",
}


def history_apart(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    """The largest difference of two histories, apart from what servers alone count."""
    a, b = ({k: v for k, v in each.items() if k not in BOOKS} for each in (a, b))
    assert a.keys() == b.keys()
    return max(abs(x - y) for key in a for x, y in zip(a[key], b[key], strict=True))


def moved(build: Build, model: Any) -> bool:
    """Whether training changed anything: an untrained model would equal an untrained model."""
    keras.utils.set_random_seed(7)
    fresh = build()
    if not fresh.built:
        fresh.build(model.input_shape)
    return apart(fresh, model) > 1e-3


def digits(rows: int = 331, features: int = 8, classes: int = 3, seed: int = 0) -> Any:
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(rows, features)).astype("float32")
    return x, dice.integers(0, classes, rows)
