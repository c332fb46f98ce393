"""The fused Adam makes Keras' own steps, on Keras' own variables."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

from stratagem.state import keras_stepper
from tests.keras_support import apart, digits, strategy, train


def made(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((30,)), layers.Dense(20), layers.Dense(3)])
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return model


OPTIMIZERS = [
    lambda: keras.optimizers.Adam(0.01),
    lambda: keras.optimizers.Adam(0.01, beta_1=0.5, beta_2=0.9, epsilon=1e-2),
    lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=1.0),
    lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_steps_are_those_of_keras(make: Any) -> None:
    plain, quick = made(make()), made(make())
    keras_stepper.fuse(quick.optimizer)
    assert keras_stepper.STEP in quick.optimizer.__dict__
    dice = torch.Generator().manual_seed(0)
    for step in range(20):
        grads = [
            torch.randn(v.shape, generator=dice) * 10.0 ** -(step % 7)
            for v in plain.trainable_variables
        ]
        with torch.no_grad():
            for model in (plain, quick):
                model.optimizer.apply([g.clone() for g in grads], model.trainable_variables)
    assert apart(plain, quick) < 1e-5
    for a, b in zip(plain.optimizer.variables, quick.optimizer.variables, strict=True):
        assert np.allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


class Own(keras.optimizers.Adam):
    """A custom step is not replaced."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(0.01),
        lambda: keras.optimizers.Adam(0.01, amsgrad=True),
        lambda: keras.optimizers.SGD(0.01),
        lambda: keras.optimizers.Nadam(0.01),
    ],
)
def test_others_keep_their_own_step(make: Any) -> None:
    model = made(make())
    keras_stepper.fuse(model.optimizer)
    assert keras_stepper.STEP not in model.optimizer.__dict__


@pytest.mark.timeout(120)
def test_one_replica_in_a_scope_equals_plain_keras() -> None:
    x, y = digits(99)
    build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(6), layers.Dense(3)])  # noqa: E731
    compile = lambda: {  # noqa: E731
        "optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3),
        "metrics": ["accuracy"],
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    fit = {"x": x, "y": y, "batch_size": 16, "epochs": 2, "validation_split": 0.1}
    alone, expected = train(build, compile, fit)
    scoped, history = train(build, compile, fit, strategy(1))
    assert apart(alone, scoped) < 1e-6
    assert history.keys() == expected.keys()
