"""Images that stay channels last: the training of plain Keras, without its copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from stratagem.compat import keras_names
from stratagem.frontends.keras import image_layout
from tests.keras_support import strategy

ROWS, SIDE = 24, 12


def everything() -> Any:
    """Every layer of Keras that copies images to channels first."""
    keras.utils.set_random_seed(0)
    inside = [
        layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
        layers.Conv2D(4, 3, dilation_rate=2, padding="same", groups=2, activation="tanh"),
        layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="tanh"),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.SeparableConv2D(6, 3, padding="same"),
        layers.MaxPooling2D(3, strides=2, padding="same"),
        layers.AveragePooling2D(3, strides=1, padding="same"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
    ]
    if keras.config.floatx() == "float32":  # in other types they round to this one all the same
        inside.insert(5, layers.BatchNormalization(momentum=0.8))
        inside[-1] = layers.GlobalAveragePooling2D()
    return keras.Sequential([keras.Input((SIDE, SIDE, 2)), *inside, layers.Dense(3)])


def trained(replicas: int) -> list[Any]:
    model = everything()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if replicas:
        with strategy(replicas).scope():
            model.compile(optimizer, loss, metrics=["accuracy"])
    else:
        model.compile(optimizer, loss, metrics=["accuracy"])
    dice = np.random.default_rng(1)
    x = dice.normal(size=(ROWS, SIDE, SIDE, 2))
    before = model.get_weights()
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(x, dice.integers(0, 3, ROWS), **fit)
    found: list[Any] = model.get_weights()
    assert not any(np.array_equal(a, b) for a, b in zip(before, found, strict=True) if a.ndim > 1)
    return found


@pytest.fixture
def floatx() -> Iterator[None]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("float64", 1e-12)])
def test_the_training_of_plain_keras_without_copies(
    monkeypatch: pytest.MonkeyPatch, floatx: None, dtype: str, close: float
) -> None:
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    operators, copies = keras_names.torch_operators(), []
    installed = getattr(operators, keras_names.TO_CHANNELS_FIRST)
    plain = getattr(installed, "plain", installed)

    def counted(images: Any) -> Any:
        copies.extend([images.shape] if images.device.type == "cpu" else [])  # not a build's
        return plain(images)

    monkeypatch.setattr(operators, keras_names.TO_CHANNELS_FIRST, counted)
    expected = trained(0)
    assert len(copies) >= 8 * 6  # layers and steps
    copies.clear()
    found = trained(1)
    assert copies == []
    assert max(abs(a - b).max() for a, b in zip(expected, found, strict=True)) < close
    copies.clear()
    trained(0)
    assert len(copies) >= 8 * 6, "plain Keras is not as it was"


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_gradients_of_convolutions_by_other_operators(
    monkeypatch: pytest.MonkeyPatch, padding: str
) -> None:
    """On any processor what is taken on ARM: the weights of plain Keras."""
    found, plain = [], image_layout.convolved

    def counted(images: Any, kernel: Any, how: str) -> Any:
        found.append(tuple(kernel.shape))
        return plain(images, kernel, how)

    operators = keras_names.torch_operators()
    image_layout._install(operators)
    monkeypatch.setattr(image_layout, "convolved", counted)
    monkeypatch.setattr(image_layout, "_BYTES", 150_000 if padding == "same" else 1 << 27)
    monkeypatch.setattr(operators, "conv", image_layout._with_fast_gradients(operators.conv))
    weights = []
    for where in (None, strategy(1)):
        keras.utils.set_random_seed(0)
        shapes = {"kernel_size": (3, 5), "padding": padding, "activation": "tanh"}
        inside = [layers.Conv2D(16, **shapes), layers.Conv2D(18, **shapes), layers.Flatten()]
        with where.scope() if where is not None else nullcontext():
            model = keras.Sequential([keras.Input((9, 11, 2)), *inside, layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        x = np.random.default_rng(1).normal(size=(10, 9, 11, 2)).astype("float32")
        model.fit(x, x[:, 0, 0], batch_size=4, epochs=2, verbose=0, shuffle=False)
        assert bool(found) == (where is not None)
        weights.append(model.get_weights())
    assert set(found) == {(3, 5, 16, 18)}
    assert max(abs(a - b).max() for a, b in zip(*weights, strict=True)) < 1e-6


def test_what_does_not_lie_so_is_copied() -> None:
    import torch

    image_layout._install(keras_names.torch_operators())
    move = getattr(keras_names.torch_operators(), keras_names.TO_CHANNELS_FIRST)
    images = torch.arange(48.0).reshape(2, 3, 4, 2)
    seen: list[Any] = []
    step = image_layout.without_copies(lambda data: seen.append(move(data)))
    for given in (images, images[:, :, ::2], images[:, 0]):
        step(given)
        assert torch.equal(seen[-1], move(given)), "other numbers"
    assert [each.data_ptr() == images.data_ptr() for each in seen] == [True, False, False]
    assert move(images).data_ptr() != images.data_ptr()


class InPlace(layers.Layer):  # type: ignore[misc]
    """Writes into what its second convolution keeps for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Conv2D(2, 3, padding="same")
        self.second = layers.Conv2D(2, 3, padding="same")

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x: Any) -> Any:
        x = self.first(x)
        x += self.second(x)
        return x


def in_place(x: Any) -> Any:
    return x.mul_(2.0) if x.device.type == "cpu" else x * 2.0


def written(how: str, one: bool) -> list[Any]:
    keras.utils.set_random_seed(0)
    images = keras.Input((SIDE, SIDE, 2))
    if how == "a layer":
        found: Any = keras.Sequential([keras.Input((SIDE, SIDE, 2)), InPlace()])(images)
    else:
        before = layers.Conv2D(2, 3, padding="same")(images)
        after = layers.ReLU()(layers.Conv2D(2, 3, padding="same")(before))  # deeper: it is first
        wraps = layers.Lambda if how == "Lambda" else layers.Activation
        found = layers.Add()([wraps(in_place)(before), after])
    model = keras.Model(images, layers.Dense(1)(layers.Flatten()(found)))
    if one:
        with strategy(1).scope():
            model.compile("sgd", "mse")
    else:
        model.compile("sgd", "mse")
    x = np.random.default_rng(1).normal(size=(8, SIDE, SIDE, 2))
    model.fit(x, x[:, 0, 0, :1], batch_size=4, shuffle=False, verbose=0)
    weights: list[Any] = model.get_weights()
    return weights


@pytest.mark.parametrize("how", ["a layer", "Lambda", "an activation"])
def test_code_of_the_user_may_write_into_images(how: str) -> None:
    expected, found = written(how, one=False), written(how, one=True)
    assert max(abs(a - b).max() for a, b in zip(expected, found, strict=True)) < 1e-6
