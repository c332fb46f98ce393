"""Before the first step a few rows are tried: what mixes rows is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import stratagem as sg
from stratagem.frontends.keras import driver
from stratagem.frontends.keras.row_check import check_step
from tests.frontends.keras.served_support import close_served, served
from tests.keras_both import both, compiled
from tests.keras_hub import Classifier
from tests.keras_support import digits, strategy

X, Y = digits(48)
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 16, "epochs": 1, "verbose": 0}
pytestmark = pytest.mark.timeout(120)


# --- what mixes rows ------------------------------------------------------------------------------


class Centred(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


class Among(layers.Layer):
    """A contraction over the batch axis: attention of rows to rows."""

    def call(self, x: Any) -> Any:
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


def with_layer(layer: Any) -> Any:
    return keras.Sequential([keras.Input((8,)), layers.Dense(6), layer(), layers.Dense(3)])


@pytest.mark.parametrize(
    ("layer", "verb"),
    [
        (Centred, "fit"),
        (Centred, "evaluate"),
        (Centred, "predict"),
        (Among, "fit"),
    ],
)
def test_a_model_that_mixes_rows(layer: Any, verb: str) -> None:
    model = compiled(strategy(2).scope, lambda: with_layer(layer))
    data = (X,) if verb == "predict" else (X, Y)
    with pytest.raises(sg.NotDistributable, match=r"outputs for a row depend on.*check=False"):
        getattr(model, verb)(*data, batch_size=16, verbose=0)


def against_others(y: Any, out: Any) -> Any:
    """Contrastive: every row is to be nearest to itself."""
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            ops.arange(len(out)), ops.matmul(out, ops.transpose(out)), from_logits=True
        )
    )


class Called(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return against_others(y_true, y_pred)


class Overridden(keras.losses.Loss):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return against_others(y_true, y_pred)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **options: Any) -> Any:
        return against_others(y, y_pred)


class OwnSteps(keras.Sequential):
    """With a tracker, and with a bare number."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mean = keras.metrics.Mean("contrast")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean]

    def train_step(self, data: Any) -> Any:
        loss = against_others(data[1], self(data[0], training=True))
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply(
                [v.value.grad for v in self.trainable_weights], self.trainable_weights
            )
        self.mean.update_state(loss)
        return {"contrast": self.mean.result()}

    def test_step(self, data: Any) -> Any:
        self.mean.update_state(against_others(data[1], self(data[0])))
        return {"contrast": self.mean.result()}


class Bare(OwnSteps):
    def test_step(self, data: Any) -> Any:
        return {"loss": against_others(data[1], self(data[0]))}


def plain(kind: Any = keras.Sequential) -> Any:
    return kind([keras.Input((8,)), layers.Dense(6)])


#: by name: the model, its loss, and what is said of it in a training and in an evaluation
MIXING: dict[str, Any] = {
    "slightly": (
        plain,
        lambda y, p: ops.mean(p**2) + 5e-4 * against_others(y, p),
        "the loss is not the mean",
        "",
    ),
    "call": (plain, Called(), "the loss is not the mean", "the loss is not the mean"),
    "function": (plain, against_others, "the loss is not the mean", "the loss is not the mean"),
    "__call__": (plain, Overridden(), "the loss is not the mean", "the loss is not the mean"),
    "compute_loss": (lambda: plain(OwnLoss), None, "loss of compute_loss", "loss is not the mean"),
    "step": (lambda: plain(OwnSteps), None, "loss of train_step", "metric 'contrast' does not add"),
    "bare": (lambda: plain(Bare), None, "loss of train_step", "the loss is not the mean"),
}


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        *((name, "fit") for name in MIXING),
        ("__call__", "evaluate"),
        ("compute_loss", "evaluate"),
        ("step", "evaluate"),
        ("bare", "evaluate"),
    ],
)
def test_a_loss_that_compares_rows(name: str, verb: str) -> None:
    build, loss, *words = MIXING[name]
    model = compiled(strategy(2).scope, build, loss=loss, metrics=[])
    with pytest.raises(sg.NotDistributable, match=words[verb == "evaluate"]):
        getattr(model, verb)(X, Y, batch_size=16, verbose=0)


class MixedUp(keras.Sequential):
    """Each row and another one, by chance."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        order = torch.randperm(len(x))
        return super().train_step((x[order] * 0.3 + x * 0.7, y[order]))


def test_rows_mixed_by_chance() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(strategy(2).scope, lambda: plain(MixedUp), loss=loss)
    with pytest.raises(sg.NotDistributable, match="outputs for a row depend"):
        model.fit(**FIT)


class Adding(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.sum(x**2))
        return x


class OnlySum(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **options: Any) -> Any:
        return ops.sum(y_pred**2)


class AddingEach(layers.Layer):
    """Adds a loss for each row, which Keras adds up."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(x**2, axis=-1))
        return x


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: with_layer(Adding),
        lambda: with_layer(AddingEach),
        lambda: plain(OnlySum),
    ],
    ids=["a sum", "a vector", "compute_loss"],
)
def test_a_sum_is_refused(build: Any, verb: str) -> None:
    """In a training and in an evaluation by one sentence, with the names of Keras."""
    model = compiled(strategy(2).scope, build)
    words = (
        r"is not the mean over the rows.*adds rows up.*self\.add_loss\(ops\.mean\(v\)\), in place "
        r"of a sum.*such as SparseCategoricalCrossentropy\(ignore_class="
    )
    with pytest.raises(sg.NotDistributable, match=words):
        getattr(model, verb)(X, Y, batch_size=16, verbose=0)


# --- what is Keras' own ---------------------------------------------------------------------------


@pytest.mark.parametrize("mixing", [layers.Softmax(axis=0), lambda x: ops.cumsum(x, 0)])
def test_a_model_of_kerass_layers_that_mixes_rows(mixing: Any) -> None:
    def build() -> Any:
        x = keras.Input((8,))
        return keras.Model(x, layers.Dense(3)(mixing(layers.Dense(6)(x))))

    model = compiled(strategy(2).scope, build)
    for verb in ("fit", "predict"):
        with pytest.raises(sg.NotDistributable, match="outputs for a row depend"):
            getattr(model, verb)(*((X, Y) if verb == "fit" else (X,)), batch_size=16, verbose=0)


def test_a_loss_of_kerass_along_the_rows() -> None:
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, axis=0)
    model = compiled(strategy(2).scope, loss=loss, metrics=[])
    with pytest.raises(sg.NotDistributable, match="the loss"):
        model.fit(X, np.eye(3, dtype="float32")[Y], batch_size=16, verbose=0)


@pytest.mark.parametrize("verb", ["fit", "predict"])
def test_a_row_that_decides_for_the_others_shows_wherever_it_is(verb: str) -> None:
    images = keras.Input((4,))
    scaled = images / ops.max(ops.abs(images))
    with strategy(2).scope():
        model = keras.Model(images, layers.Dense(1)(scaled))
        model.compile("sgd", "mse")
    for place in range(5):
        x = np.random.default_rng(place).uniform(0.1, 1.0, (12, 4))
        x[place] *= 3.0
        with pytest.raises(sg.NotDistributable, match="other rows"):
            model.fit(x, x[:, :1], batch_size=12, shuffle=False, verbose=0) if verb == "fit" else (
                model.predict(x, batch_size=12, verbose=0)
            )


# --- which batches are checked --------------------------------------------------------------------


class Perhaps(layers.Layer):
    """Subtracts the mean of the batch, if it is told to."""

    mixes = False

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0) if self.mixes else x


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that fits three batches and returns how many were checked."""
    checks: list[str] = []

    def counted(model: Any, step: str, *args: Any, **kwargs: Any) -> None:
        checks.append(step)
        check_step(model, step, *args, **kwargs)

    def fit(model: Any) -> int:
        checks.clear()
        model.fit(**FIT)
        return len(checks)

    monkeypatch.setattr(driver, "check_step", counted)
    return fit


def own_loss(y: Any, out: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)


@pytest.mark.parametrize(
    ("build", "how"),
    [(lambda: with_layer(Perhaps), {}), (lambda: with_layer(layers.ReLU), {"loss": own_loss})],
)
def test_later_batches_are_checked_for_user_code(build: Any, how: Any, checked: Any) -> None:
    model = compiled(strategy(2).scope, build, **how)
    assert [checked(model) for _ in range(3)] == [2, 1, 1]  # 1 and 2; 4; 8
    model.compile("sgd", model.loss)
    assert checked(model) == 2


def test_of_keras_own_code_the_first_batch_is_checked(checked: Any) -> None:
    model = compiled(strategy(2).scope, lambda: with_layer(layers.ReLU))
    assert [checked(model) for _ in range(2)] == [1, 0]


def test_what_is_refused_is_refused_each_time(checked: Any) -> None:
    model = compiled(strategy(2).scope, lambda: with_layer(Perhaps))
    assert checked(model) == 2
    model.layers[1].mixes = True
    for _ in range(3):
        with pytest.raises(sg.NotDistributable, match="outputs for a row depend"):
            checked(model)


# --- what it costs --------------------------------------------------------------------------------


class AsItIs(layers.Layer):
    def call(self, x: Any) -> Any:
        return x * 1.0


class AsKeras(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.mark.parametrize(
    "build",
    [lambda: with_layer(layers.ReLU), lambda: with_layer(AsItIs), lambda: plain(AsKeras)],
)
def test_it_costs_less_than_a_step(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of the first replica: forward they count once, backward twice."""
    passed: list[int] = []
    dense = layers.Dense.call

    def counted(self: Any, x: Any, *rest: Any, **options: Any) -> Any:
        out = dense(self, x, *rest, **options)
        if self.units == 6:  # one of them
            passed.append(len(x))
            if out.requires_grad:
                out.register_hook(lambda gradient: passed.append(2 * len(gradient)))
        return out

    costs = {}
    for check in (False, True):
        with strategy(2).scope(check=check):
            model = compiled(nullcontext, build)
        monkeypatch.setattr(layers.Dense, "call", counted)
        passed.clear()
        model.fit(X[:24], Y[:24], batch_size=24, verbose=0)
        costs[check] = sum(passed)
        monkeypatch.undo()
    step, most = 3 * 12, 3 * 10
    assert costs[False] in (step, step + 24)  # Keras may build a model with a whole batch
    assert 0 < costs[True] - costs[False] <= most < step


# --- what comes later -----------------------------------------------------------------------------

#: of the second batch some rows do not count
LATE_X, LATE_Y = digits(48)
_MASKED = (np.arange(48) // 16 == 1) & (np.arange(48) % 3 == 0)
LATE_Y = np.where(_MASKED, -1.0, LATE_Y)[:, None]


def of_those_that_count(y: Any, p: Any) -> Any:
    counts = ops.cast(ops.reshape(y, (-1,)) >= 0, p.dtype)
    return ops.sum(ops.mean(p**2, -1) * counts) / ops.sum(counts)


class LateLoss(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **options: Any) -> Any:
        return of_those_that_count(y, y_pred)


class LateStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        self.zero_grad()
        loss = of_those_that_count(data[1], self(data[0], training=True))
        loss.backward()
        variables = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        return {"loss": loss}


LATE: dict[str, Any] = {
    "compute_loss": (lambda: plain(LateLoss), {"loss": None}),
    "train_step": (lambda: plain(LateStep), {"loss": None}),
    "loss": (plain, {"loss": of_those_that_count}),
    "metric": (plain, {"loss": "mse", "metrics": [of_those_that_count]}),
}


@pytest.mark.parametrize("name", LATE)
def test_a_mask_that_comes_later(name: str) -> None:
    build, how = LATE[name]
    model = compiled(strategy(2).scope, build, **{"metrics": []} | how)
    with pytest.raises(sg.NotDistributable):
        model.fit(LATE_X, LATE_Y, batch_size=16, shuffle=False, verbose=0)


def test_a_mask_that_comes_later_with_servers() -> None:
    build, how = LATE["train_step"]
    fit: dict[str, Any] = {"batch_size": 16, "shuffle": False, "verbose": 0}
    ends = []
    for scope in (nullcontext, served(sg.Synchronous()).scope):
        keras.utils.set_random_seed(7)
        model = compiled(scope, build, metrics=[], **how)
        # nothing of the two checks comes to the servers
        model.fit(LATE_X[32:], LATE_Y[32:], epochs=2, **fit)
        ends.append(model.get_weights())
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    with pytest.raises(sg.NotDistributable, match="loss of train_step is not the mean"):
        model.fit(LATE_X, LATE_Y, **fit)  # its second batch is the 4th
    close_served()


def test_a_mask_of_kerass_that_comes_later_is_exact() -> None:
    words = np.random.default_rng(0).integers(1, 9, (48, 6))
    words[40:, 3:] = 0  # in the third batch, which is not checked
    targets = np.arange(48 * 6).reshape(48, 6) % 3

    def build() -> Any:
        embedding = layers.Embedding(9, 5, mask_zero=True)
        lstm = layers.LSTM(4, return_sequences=True)
        return keras.Sequential([keras.Input((6,)), embedding, lstm, layers.Dense(3)])

    def play(scope: Any) -> Any:
        model = compiled(scope, build)
        history = model.fit(words, targets, batch_size=16, shuffle=False, verbose=0).history
        return [model.get_weights(), history]

    both(play, 2, 1e-6)


@pytest.mark.parametrize("name", ["layer", "step"])
def test_with_servers_that_share_a_batch(name: str) -> None:
    build, loss, words, _ = MIXING.get(name) or (
        lambda: with_layer(Centred),
        None,
        "outputs for a row depend",
        "",
    )
    model = compiled(served(sg.Synchronous()).scope, build, **({"loss": loss} if loss else {}))
    with pytest.raises(sg.NotDistributable, match=words):
        model.fit(**FIT)
    model = compiled(served(sg.Asynchronous()).scope, build, **({"loss": loss} if loss else {}))
    model.fit(**FIT)  # workers have whole batches
    close_served()


def test_it_is_skipped_on_demand() -> None:
    with strategy(2).scope(check=False):
        model = with_layer(Centred)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(**FIT)
    assert model.predict(X, verbose=0).shape == (48, 3)


# --- what does not -------------------------------------------------------------------------------


class Counting(keras.metrics.Metric):
    """A metric without a reset."""

    def __init__(self, name: str = "counting", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(float(len(y_true)))

    def result(self) -> Any:
        return self.rows.value

    def reset_state(self) -> None:
        pass


def test_a_metric_that_is_never_reset() -> None:
    def play(scope: Any) -> Any:
        model = compiled(scope, metrics=[Counting()])
        history = model.fit(**FIT | {"epochs": 2}).history
        return [history["counting"], model.evaluate(X, Y, verbose=0)[1]]

    found = both(play, 2, 1e-6)
    assert found[0] == [48.0, 96.0] and found[1] == 144.0


def test_a_metric_that_is_never_reset_with_servers() -> None:
    model = compiled(served(sg.Synchronous()).scope, metrics=[Counting()])
    history = model.fit(**FIT | {"epochs": 2}).history
    assert history["counting"] == [48.0, 96.0]
    close_served()


class Laden(Counting):
    """A metric with a base so large that counts are rounded."""

    def __init__(self, name: str = "laden", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.rows.assign(4e6)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(0.33 * len(y_true))


def test_counts_beside_what_is_there() -> None:
    compiled(strategy(2).scope, metrics=[Laden()]).fit(**FIT)


class RoundedByRows(layers.Layer):
    def call(self, x: Any) -> Any:
        return x * len(x) / len(x)


def test_where_gradients_are_rounding() -> None:
    """A loss that has reached its minimum."""
    model = compiled(strategy(2).scope, lambda: with_layer(RoundedByRows), loss="mse", metrics=[])
    out = model.predict(X, verbose=0)
    for off in (0.0, 1e-7, 1e-6):
        model.fit(X, out * (1 + off), batch_size=16, verbose=0)


class Restless(keras.Sequential):
    """Draws, counts its steps, and keeps a statistic."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = 0
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def train_step(self, data: Any) -> Any:
        self.steps += 1
        self.seen.assign_add(1.0)
        return super().train_step(data)


def restless_layers(kind: Any = keras.Sequential) -> Any:
    return kind(
        [
            keras.Input((8,)),
            layers.GaussianNoise(0.1, seed=3),
            layers.Dense(6, kernel_regularizer="l2"),
            layers.Dropout(0.5),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )


def test_no_trace() -> None:
    """The same weights, metrics and random numbers with and without."""
    ends = []
    for check in (True, False):
        keras.utils.set_random_seed(11)
        with strategy(2).scope(check=check):
            model = restless_layers(Restless)
            model.compile(
                "adam",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        history = model.fit(**FIT | {"epochs": 2}).history
        assert (model.steps, float(model.seen)) == (6, 6.0)
        ends.append((model.get_weights(), history, np.random.rand(), torch.rand(())))
    for ours, theirs in zip(ends[0][0], ends[1][0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert ends[0][1:] == ends[1][1:]


def test_a_functional_model_of_a_module() -> None:
    """As model hubs write it: the class becomes functional in the process that makes a model."""

    def play(scope: Any) -> Any:
        model = compiled(scope, Classifier)
        model.fit(**FIT)
        return [model.get_weights(), model.predict(X, verbose=0)]

    both(play)
