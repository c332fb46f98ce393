"""Keras models: each built, compiled and fitted once as written, plainly and in a scope."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers

import stratagem as sg
from tests.conformance.net import Cases, Result

case = Cases()
BATCH = 8
#: of Keras' variables, which are float32: sums of other orders, a few steps long
TIGHT = (2e-6, 2e-6)
ADAPTIVE = (1e-5, 1e-5)


@dataclass
class Training:
    """What a script does with Keras."""

    model: Any
    x: Any
    y: Any
    optimizer: Any = field(default_factory=lambda: keras.optimizers.SGD(0.2, momentum=0.9))
    loss: Any = field(
        default_factory=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    #: further arguments of `compile` and of `fit`
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    #: whether `evaluate` and `predict` are compared, too
    judged: bool = True
    #: called with the model afterwards: more named values
    after: Callable[[Any], Result] | None = None


def net(*inner: Any) -> Any:
    inner = inner or (layers.Dense(6, "tanh"),)
    return keras.Sequential([layers.Input((5,)), *inner, layers.Dense(4)])


def data(rows: int = 19) -> tuple[Any, Any]:
    dice = np.random.default_rng(7)
    return dice.normal(size=(rows, 5)).astype("float32"), dice.integers(0, 4, rows)


def play(name: str, strategy: sg.Strategy | None = None) -> Result:
    """Build, compile, fit, evaluate, predict; weights, history and results."""
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy is not None else nullcontext():
        job: Training = case[name].play()
        job.model.compile(optimizer=job.optimizer, loss=job.loss, **job.compile)
    options = {"epochs": job.epochs, "shuffle": False, "verbose": 0, **job.fit}
    given = options.pop("data", (job.x, job.y))
    if len(given) > 1:
        options["batch_size"] = BATCH
    history = job.model.fit(*given, **options).history
    found: Result = {name: np.asarray(values) for name, values in history.items()}
    if job.judged:
        judged = job.model.evaluate(job.x, job.y, batch_size=BATCH, verbose=0, return_dict=True)
        found |= {f"evaluated {name}": value for name, value in judged.items()}
        found["predicted"] = job.model.predict(job.x, batch_size=BATCH, verbose=0)
    if job.after is not None:
        found |= job.after(job.model)
    weights = {f"{i} {v.name}": v.numpy() for i, v in enumerate(job.model.weights)}
    return found | weights


@case("batches that do not divide", tolerance=TIGHT)
def _() -> Training:
    return Training(net(), *data(), compile={"metrics": ["accuracy"]})
