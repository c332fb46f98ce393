"""Every kind of data that Keras takes, cut into shares of the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset

from stratagem.errors import NotDistributable
from tests.keras_both import Scope, both, compiled, mlp, outcome
from tests.keras_support import digits, strategy

X, Y = digits(50)
W = np.linspace(0.1, 2.0, 50).astype("float32")
pytestmark = pytest.mark.timeout(120)


def trains_alike(
    fit: Callable[[], dict[str, Any]], build: Any = mlp, replicas: int = 3, **compile: Any
) -> Any:
    """`fit` makes the arguments anew for each of the two runs, as generators run out."""

    def play(scope: Scope) -> Any:
        model = compiled(scope, build, **compile)
        before = [w.copy() for w in model.get_weights()]
        options = {"verbose": 0, "epochs": 2} | fit()
        found = model.fit(**options)
        assert (
            max(np.abs(a - b).max() for a, b in zip(before, model.get_weights(), strict=True))
            > 1e-3
        )
        return [outcome(model, found), found.epoch]

    return both(play, replicas)


class Batches(keras.utils.PyDataset):
    """Changes its order at the end of an epoch."""

    def __init__(self, weights: bool = False, only_x: bool = False, **more: Any) -> None:
        super().__init__(**more)
        self.weights, self.only_x, self.turn = weights, only_x, 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = slice((index + self.turn) % 4 * 16, (index + self.turn) % 4 * 16 + 16)
        if self.only_x:
            return (X[rows],)
        return (X[rows], Y[rows], W[rows]) if self.weights else (X[rows], Y[rows])

    def on_epoch_end(self) -> None:
        self.turn += 1


def generator(times: int = 10**6, weights: bool = False, only_x: bool = False) -> Iterator[Any]:
    for i in range(times):
        start = i * 13 % 40
        rows = slice(start, start + 7 + i % 5)
        if only_x:
            yield (X[rows],)
        else:
            yield (X[rows], Y[rows], W[rows]) if weights else (X[rows], Y[rows])


def loader(batch: int = 16, **more: Any) -> Any:
    return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch, **more)


# --- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fit",
    [
        pytest.param(
            lambda: {"x": torch.from_numpy(X), "y": torch.from_numpy(Y), "batch_size": 16},
            id="tensors",
        ),
        pytest.param(lambda: {"x": X, "y": Y}, id="default_batch"),
        pytest.param(lambda: {"x": X, "y": Y, "batch_size": None}, id="batch_none"),
        pytest.param(lambda: {"x": X.astype("float64"), "y": Y.astype("int16")}, id="other_types"),
        pytest.param(lambda: {"x": X, "y": Y, "batch_size": 16, "steps_per_epoch": 3}, id="steps"),
        pytest.param(
            lambda: {"x": X, "y": Y, "batch_size": 16, "epochs": 3, "steps_per_epoch": 6},
            id="more_steps_than_data",
        ),
        pytest.param(lambda: {"x": X, "y": Y, "batch_size": 16, "shuffle": False}, id="in_order"),
        pytest.param(lambda: {"x": Batches()}, id="dataset"),
        pytest.param(lambda: {"x": Batches(weights=True)}, id="weighted_dataset"),
        pytest.param(
            lambda: {"x": Batches(), "shuffle": True, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
            id="class_weights",
        ),
        pytest.param(
            lambda: {"x": Batches(workers=2), "shuffle": False}, id="dataset_with_threads"
        ),
        pytest.param(
            lambda: {"x": Batches(), "steps_per_epoch": 3, "epochs": 3}, id="dataset_steps"
        ),
        pytest.param(lambda: {"x": loader()}, id="loader"),
        pytest.param(lambda: {"x": loader(shuffle=True)}, id="shuffled_loader"),
        pytest.param(lambda: {"x": loader(drop_last=True)}, id="loader_drop_last"),
        pytest.param(lambda: {"x": loader(batch=49)}, id="loader_last_of_one"),
        pytest.param(lambda: {"x": loader(num_workers=1)}, id="loader_with_worker"),
        pytest.param(lambda: {"x": generator(), "steps_per_epoch": 5}, id="generator"),
        pytest.param(
            lambda: {"x": generator(weights=True), "steps_per_epoch": 5}, id="weighted_generator"
        ),
        pytest.param(lambda: {"x": generator(times=6), "epochs": 1}, id="generator_of_one_epoch"),
        pytest.param(
            lambda: {"x": generator(times=8), "steps_per_epoch": 5, "epochs": 2},
            id="generator_runs_dry",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_training(fit: Any) -> None:
    trains_alike(fit)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(lambda: {"validation_split": 0.3}, id="split"),
        pytest.param(lambda: {"validation_split": 0.3, "sample_weight": W}, id="weighted_split"),
        pytest.param(lambda: {"validation_data": (X[:20], Y[:20])}, id="pair"),
        pytest.param(lambda: {"validation_data": (X[:20], Y[:20], W[:20])}, id="triple"),
        pytest.param(
            lambda: {"validation_data": (X[:20], Y[:20]), "validation_batch_size": 3},
            id="batch_size",
        ),
        pytest.param(lambda: {"validation_data": Batches(weights=True)}, id="dataset"),
        pytest.param(lambda: {"validation_data": loader()}, id="loader"),
        pytest.param(
            lambda: {"validation_data": generator(), "validation_steps": 3}, id="generator"
        ),
        pytest.param(lambda: {"validation_data": (X, Y), "validation_steps": 2}, id="steps"),
        pytest.param(
            lambda: {"validation_data": (X, Y), "validation_freq": 2, "epochs": 4}, id="freq"
        ),
        pytest.param(
            lambda: {"validation_data": (X, Y), "validation_freq": [1, 3], "epochs": 3},
            id="freq_list",
        ),
    ],
)
def test_validation(more: Any) -> None:
    trains_alike(lambda: {"x": X, "y": Y, "batch_size": 16} | more(), weighted_metrics=["accuracy"])


def pictures(kind: str) -> Any:
    return np.random.default_rng(0).integers(0, 255, (50, 4, 4, 3)).astype(kind)


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        ("uint8", False),
        ("uint8", True),
        ("int32", False),
        ("uint16", False),
        ("bool", False),
        ("float16", True),
    ],
)
def test_whole_numbers(kind: str, tensors: bool) -> None:
    """Pictures as they come from a file; labels as small numbers."""
    build = lambda: keras.Sequential(  # noqa: E731
        [
            keras.Input((4, 4, 3)),
            layers.Lambda(lambda x: keras.ops.cast(x, "float32") / 255.0),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )

    def fit() -> Any:
        x, y = pictures(kind), Y.astype("uint8")
        if tensors:
            x, y = torch.from_numpy(x), torch.from_numpy(y)
        return {"x": x, "y": y, "batch_size": 16}

    trains_alike(fit, build)


def two_inputs() -> Any:
    a, b = keras.Input((8,)), keras.Input((3,))
    return keras.Model([a, b], layers.Dense(3)(layers.Concatenate()([a, b])))


def two_outputs() -> Any:
    x = keras.Input((8,))
    return keras.Model(x, [layers.Dense(3, name="one")(x), layers.Dense(1, name="two")(x)])


def test_list_of_inputs() -> None:
    trains_alike(lambda: {"x": [X, X[:, :3]], "y": Y, "batch_size": 16}, two_inputs)


def test_list_of_inputs_from_a_generator() -> None:
    def source() -> Iterator[Any]:
        for x, y in generator():
            yield (x, x[:, :3]), y

    trains_alike(lambda: {"x": source(), "steps_per_epoch": 4}, two_inputs)


def test_list_of_targets() -> None:
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    trains_alike(
        lambda: {
            "x": X,
            "y": [Y, X[:, :1]],
            "batch_size": 16,
            "sample_weight": [W, W[::-1].copy()],
        },
        two_outputs,
        loss=losses,
        metrics=[["accuracy"], ["mae"]],
    )


class Reconstruction(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(8)

    def call(self, x: Any) -> Any:
        y = self.inner(x)
        self.add_loss(keras.ops.mean(keras.ops.square(x - y)))
        return y


@pytest.mark.parametrize(
    "fit",
    [
        pytest.param(lambda: {"x": X, "batch_size": 16}, id="array"),
        pytest.param(lambda: {"x": Batches(only_x=True)}, id="dataset"),
        pytest.param(lambda: {"x": generator(only_x=True), "steps_per_epoch": 4}, id="generator"),
    ],
)
def test_inputs_only(fit: Any) -> None:
    trains_alike(
        fit,
        lambda: keras.Sequential([keras.Input((8,)), Reconstruction()]),
        loss=None,
        metrics=None,
    )


def test_autoencoder() -> None:
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((8,)), layers.Dense(3, activation="tanh"), layers.Dense(8)]
    )
    trains_alike(lambda: {"x": X, "y": X, "batch_size": 16}, build, loss="mae", metrics=["mse"])


def test_series_of_other_lengths_in_each_batch() -> None:
    def source() -> Iterator[Any]:
        dice = np.random.default_rng(0)
        while True:
            yield dice.normal(size=(7, int(dice.integers(2, 6)), 4)), dice.integers(0, 3, 7)

    build = lambda: keras.Sequential([keras.Input((None, 4)), layers.GRU(3)])  # noqa: E731
    trains_alike(lambda: {"x": source(), "steps_per_epoch": 4}, build, replicas=2)


def test_parts_of_a_batch_of_unequal_length_are_refused() -> None:
    """A constant beside the examples: who would get which rows of it?"""

    class Shifted(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.out(inputs[0] @ inputs[1])

    def source() -> Iterator[Any]:
        for x, y in generator():
            yield (x, np.ones((8, 8), "float32")), y

    def play(scope: Scope) -> Any:
        model = compiled(scope, Shifted)
        return outcome(model, model.fit(source(), steps_per_epoch=4, verbose=0))

    try:
        both(play)
    except NotDistributable as error:
        assert "rows" in str(error) or "examples" in str(error)


def test_one_number_beside_the_examples() -> None:
    """A tensor without any axis goes to every replica."""

    class Scaled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.out(inputs["rows"] * inputs["scale"])

    def play(scope: Scope) -> Any:
        model = compiled(scope, Scaled)
        for i in range(3):
            model.train_on_batch({"rows": torch.from_numpy(X), "scale": torch.tensor(float(i))}, Y)
        return outcome(model)

    try:
        both(play)
    except NotDistributable as error:
        assert str(error)


def test_exception_in_the_data() -> None:
    """It arrives as it is, and the next call works."""

    class Broken(Batches):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    model = compiled(strategy(2).scope)
    with pytest.raises(OSError, match="disk"):
        model.fit(Broken(), shuffle=False, verbose=0)
    model.fit(Batches(), verbose=0)


# --- evaluation and prediction ----------------------------------------------------------------


SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 7},
    "weights": lambda: {"x": X, "y": Y, "sample_weight": W, "batch_size": 7},
    "tensors": lambda: {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)},
    "dataset": lambda: {"x": Batches(weights=True)},
    "loader": lambda: {"x": loader(7)},
    "generator": lambda: {"x": generator(), "steps": 4},
    "finite": lambda: {"x": generator(times=5)},
    "steps": lambda: {"x": X, "y": Y, "batch_size": 7, "steps": 3},
    "one": lambda: {"x": X[:1], "y": Y[:1]},
}


@pytest.mark.parametrize("name", SOURCES)
def test_evaluation_and_prediction(name: str) -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope, weighted_metrics=["accuracy"])
        said = [
            model.evaluate(**SOURCES[name](), verbose=0),
            model.evaluate(**SOURCES[name](), verbose=0, return_dict=True),
        ]
        data = {k: v for k, v in SOURCES[name]().items() if k not in ("y", "sample_weight")}
        return [*said, model.predict(**data, verbose=0)]

    both(play, 3, moves=False)


def test_single_batches() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        said = [
            model.train_on_batch(X[:9], Y[:9], class_weight={0: 1.0, 1: 4.0, 2: 0.1}),
            model.train_on_batch(X[:9], Y[:9], sample_weight=W[:9], return_dict=True),
            model.train_on_batch(torch.from_numpy(X[:1]), torch.from_numpy(Y[:1])),
            model.test_on_batch(X[:9], Y[:9], sample_weight=W[:9]),
            model.predict_on_batch(X[:4]),
            model.predict_on_batch(torch.from_numpy(X[:1])),
        ]
        return [said, outcome(model)]

    both(play, 3)


def test_prediction_does_not_shuffle_and_loses_nothing() -> None:
    model = compiled(strategy(3).scope)
    whole = model.predict(X, batch_size=50, verbose=0)
    for batch in (1, 2, 7, 49):
        np.testing.assert_allclose(model.predict(X, batch_size=batch, verbose=0), whole, atol=1e-6)
