"""Callbacks run once, on the chief; what they change reaches every replica."""

from __future__ import annotations

import csv
import gc
import operator
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import callbacks as cb
from keras import layers

import stratagem as sg
from tests.keras_both import Scope, both, compiled, mlp, outcome
from tests.keras_support import digits, strategy
from tests.support import cpus

X, Y = digits(50)
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 16, "epochs": 3, "verbose": 0}
SHORT = FIT | {"epochs": 1}
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(120)


def fitted(scope: Scope, made: Any, **more: Any) -> Any:
    """Trains with the callbacks that `made()` makes."""
    model = compiled(scope)
    found = model.fit(**(FIT | more), callbacks=made())
    return outcome(model, found)


class AtStep(cb.Callback):
    """Calls a function before one step."""

    def __init__(self, step: int, act: Any) -> None:
        super().__init__()
        self.step, self.act, self.now = step, act, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.now == self.step:
            self.act(self.model)
        self.now += 1


# --- Keras' own -------------------------------------------------------------------------------


def test_early_stopping_restores_the_best_weights() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope, optimizer=keras.optimizers.SGD(1.5))
        stop = cb.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
        found = model.fit(
            **(FIT | {"epochs": 8}), validation_data=(X[:20], Y[:20] * 0), callbacks=[stop]
        )
        return [outcome(model, found), stop.stopped_epoch, model.evaluate(X, Y, verbose=0)]

    found = both(play)
    assert found[1] > 0


def test_plateau_lowers_the_rate() -> None:
    def play(scope: Scope) -> Any:
        plateau = cb.ReduceLROnPlateau(monitor="loss", factor=0.3, patience=1, min_delta=1.0)
        return fitted(scope, lambda: [plateau], epochs=5)

    rates = both(play, 3)[1]["learning_rate"]
    assert rates[-1] < rates[0]


def test_schedule_by_a_callback_from_the_first_epoch() -> None:
    """The first change comes before the first step."""
    both(lambda scope: fitted(scope, lambda: [cb.LearningRateScheduler(lambda e: 0.5 / (e + 1))]))


@pytest.mark.parametrize(("frequency", "weights_only"), [("epoch", False), (3, True)])
def test_checkpoints(tmp_path: Path, frequency: Any, weights_only: bool) -> None:
    ending = ".weights.h5" if weights_only else ".keras"

    def play(scope: Scope) -> Any:
        folder = tmp_path / ("alone" if not os.listdir(tmp_path) else "spread")
        folder.mkdir()
        batch = "-{batch}" if frequency != "epoch" else ""
        save = cb.ModelCheckpoint(
            str(folder / ("e{epoch}" + batch + ending)),
            save_freq=frequency,
            save_weights_only=weights_only,
        )
        fitted(scope, lambda: [save])
        saved = []
        for path in sorted(folder.iterdir()):
            if weights_only:
                model = mlp()
                model.load_weights(path)
            else:
                model = keras.models.load_model(path)
            saved += [path.name, model.get_weights()]
        return saved

    assert both(play)


def test_best_checkpoint_by_steps(tmp_path: Path) -> None:
    """`save_freq=int` with `save_best_only` compares the numbers of single steps."""

    def play(scope: Scope) -> Any:
        path = tmp_path / "best.keras"
        save = cb.ModelCheckpoint(
            str(path), save_freq=5, save_best_only=True, monitor="loss", mode="min"
        )
        fitted(scope, lambda: [save], shuffle=False)
        return [keras.models.load_model(path).get_weights(), save.best]

    both(play)


def test_backup_and_restore(tmp_path: Path) -> None:
    def play(scope: Scope) -> Any:
        folder = tmp_path / ("alone" if not os.listdir(tmp_path) else "spread")

        def fail(model: Any) -> None:
            raise OSError("the power is gone")

        model = compiled(scope)
        with pytest.raises(OSError, match="power"):
            model.fit(
                **FIT, shuffle=False, callbacks=[cb.BackupAndRestore(folder), AtStep(5, fail)]
            )
        again = compiled(scope)
        found = again.fit(**FIT, shuffle=False, callbacks=[cb.BackupAndRestore(folder)])
        return [outcome(again, found), found.epoch]

    both(play, shared=False)  # after an error replicas are started anew


def test_csv_logger(tmp_path: Path) -> None:
    def play(scope: Scope) -> Any:
        path = tmp_path / "log.csv"
        fitted(scope, lambda: [cb.CSVLogger(path)])
        with path.open() as file:
            return [
                {k: float(v) for k, v in row.items() if v != "NA"} for row in csv.DictReader(file)
            ]

    assert len(both(play)) == 3


def test_terminate_on_nan_stops_at_the_same_step() -> None:
    """The example that spoils the loss lies in the last replica's share."""
    x = X.copy()
    x[15] = np.nan

    def play(scope: Scope) -> Any:
        steps: list[int] = []
        seen = cb.LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(batch))
        model = compiled(scope)
        model.fit(
            x,
            Y,
            batch_size=16,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=[cb.TerminateOnNaN(), seen],
        )
        return steps

    assert both(play, moves=False) == [0]  # they are NaN


def test_swapped_ema_weights() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope, optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8))
        found = model.fit(
            **FIT, validation_data=(X, Y), callbacks=[cb.SwapEMAWeights(swap_on_epoch=True)]
        )
        return outcome(model, found)

    both(play)


# --- what is seen -----------------------------------------------------------------------------


class Numbers(cb.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([batch, dict(logs)])

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([batch, dict(logs)])


@pytest.mark.parametrize("how", ["keyword", "positional", "alone", "list"])
def test_batch_logs(how: str) -> None:
    def play(scope: Scope) -> Any:
        numbers = Numbers()
        model = compiled(scope)
        if how == "positional":
            model.fit(X, Y, 16, 2, 0, [numbers])
        elif how == "list":
            made = cb.CallbackList([numbers], model=model, add_history=True)
            model.fit(X, Y, batch_size=16, epochs=2, callbacks=made)
        else:
            each = numbers if how == "alone" else [numbers]
            model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=each)
        if how == "alone":  # Keras calls a callback outside a list from threads, in any order
            return sorted(numbers.seen[:4], key=first) + sorted(numbers.seen[4:], key=first)
        return numbers.seen

    first = operator.itemgetter(0)
    assert len(both(play, 3)) == 8


def test_batch_logs_of_evaluation() -> None:
    def play(scope: Scope) -> Any:
        numbers = Numbers()
        model = compiled(scope)
        model.evaluate(X, Y, batch_size=16, verbose=0, callbacks=[numbers])
        model.fit(**FIT, validation_data=(X[:33], Y[:33]), callbacks=[numbers])
        return numbers.seen

    both(play, 3)


def test_batch_logs_seen_by_a_lambda() -> None:
    def play(scope: Scope) -> Any:
        seen: list[Any] = []
        fitted(
            scope,
            lambda: [
                cb.LambdaCallback(
                    on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"]))
                )
            ],
        )
        return seen

    assert len(both(play, 3)) == 12


def test_every_hook_runs_once_and_in_order() -> None:
    class Diary(cb.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[Any] = [os.getpid()]

    for name in dir(cb.Callback):
        if name.startswith("on_"):

            def write(self: Any, *args: Any, name: str = name, **kwargs: Any) -> None:
                self.lines.append(
                    f"{name}{args[0] if isinstance(args[0], int) else ''}" if args else name
                )

            setattr(Diary, name, write)

    def play(scope: Scope) -> Any:
        diary = Diary()
        model = compiled(scope)
        model.fit(**FIT, validation_data=(X, Y), callbacks=[diary])
        model.predict(X, verbose=0, callbacks=[diary])
        return diary.lines

    assert len(both(play)) > 30


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_is_shown_once(verbose: int, capfd: Any) -> None:
    """Line by line what plain Keras writes, but for the times."""

    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.fit(**(FIT | {"verbose": verbose}), validation_data=(X, Y))
        model.evaluate(X, Y, verbose=verbose)
        lines = capfd.readouterr().out.replace("\b", "").replace("\r", "\n").splitlines()
        ends = [line for line in lines if "val_loss" in line or "Epoch" in line]
        return [line.split(" - ")[-4:] for line in ends if not line.startswith("[replica")]

    found = both(play)
    assert len(found) == 6


def test_callback_attributes() -> None:
    """`model`, `params` and `history` are those of plain Keras."""

    def play(scope: Scope) -> Any:
        numbers = Numbers()
        model = compiled(scope)
        found = model.fit(**FIT, callbacks=[numbers])
        assert numbers.model is model and found is model.history
        return numbers.params

    both(play)


# --- what is changed --------------------------------------------------------------------------


def test_weights_set_between_steps() -> None:
    def act(model: Any) -> None:
        model.set_weights([w * 0.5 for w in model.get_weights()])

    both(lambda scope: fitted(scope, lambda: [AtStep(5, act)]), 3)


def test_one_variable_assigned_between_steps() -> None:
    def act(model: Any) -> None:
        model.layers[0].kernel.assign(model.layers[0].kernel * 0.5)

    both(lambda scope: fitted(scope, lambda: [AtStep(0, act), AtStep(6, act)]), 3)


def test_weights_set_when_training_begins() -> None:
    def play(scope: Scope) -> Any:
        def begin(logs: Any) -> None:
            model.set_weights([w * 0.3 for w in model.get_weights()])

        model = compiled(scope)
        model.fit(**FIT, callbacks=[cb.LambdaCallback(on_train_begin=begin)])
        return outcome(model)

    both(play)


def test_rate_changed_between_steps() -> None:
    def act(model: Any) -> None:
        model.optimizer.learning_rate = 0.7

    both(lambda scope: fitted(scope, lambda: [AtStep(3, act)]))


def test_rate_changed_before_the_first_step() -> None:
    def act(model: Any) -> None:
        model.optimizer.learning_rate = 0.7

    both(lambda scope: fitted(scope, lambda: [AtStep(0, act)]))


def test_schedule_replaced_between_steps_is_refused() -> None:
    def act(model: Any) -> None:
        model.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.7, 10)

    with pytest.raises(sg.UsageError, match="LearningRateScheduler"):
        fitted(strategy(2).scope, lambda: [AtStep(2, act)])


@pytest.mark.parametrize("place", ["mirrored", "servers"])
def test_activation_replaced_between_steps_is_refused(place: str) -> None:
    def act(model: Any) -> None:
        model.layers[0].activation = keras.activations.softplus

    where = strategy(2) if place == "mirrored" else sg.ParameterServerStrategy()
    with pytest.raises(sg.UsageError, match=r"activation was replaced while the model trains"):
        fitted(where.scope, lambda: [AtStep(2, act)])
    if place == "servers":
        where.close()


def test_activation_replaced_between_calls() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.train_on_batch(X[:16], Y[:16])
        model.layers[0].activation = keras.activations.softplus
        model.train_on_batch(X[:16], Y[:16])
        model.layers[0].activation = keras.activations.sigmoid
        return outcome(model, model.fit(**FIT))

    both(play)


def test_schedule_replaced_between_calls() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.fit(**FIT)
        for first in (0.3, 0.7):
            rate = keras.optimizers.schedules.CosineDecay(first, 30)
            model.optimizer.learning_rate = rate
            model.train_on_batch(X[:16], Y[:16])
            model.train_on_batch(X[:16], Y[:16])
        return outcome(model, model.fit(**FIT))

    both(play)


class Leaning(keras.Model):
    """Plain Python numbers of a model and of a layer take part in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(5)
        self.out = layers.Dense(3)
        self.beta = 0.0
        self.inner.factor = 1.0

    def call(self, x: Any) -> Any:
        return self.out(self.inner(x) * self.inner.factor) * (1 - self.beta)


class Leaned(keras.losses.Loss):
    gamma = 1.0

    def call(self, y: Any, p: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(keras.ops.one_hot(y, 3) - p) ** self.gamma, axis=-1)


class Annealing(cb.Callback):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.beta = self.kind(0.3 * epoch)
        self.model.inner.factor = self.kind(1.0 + epoch)


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, torch.tensor])
@pytest.mark.parametrize("first", [0, 1])
def test_plain_attributes_changed_between_epochs(first: int, kind: Any) -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope, Leaning)
        return outcome(model, model.fit(**FIT, initial_epoch=first, callbacks=[Annealing(kind)]))

    try:
        both(play, 3)
    except sg.NotDistributable as error:
        assert kind is torch.tensor and "factor" in str(error)


def test_attribute_of_the_loss_changed_between_epochs() -> None:
    class Sharpening(cb.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.loss.gamma = 1.0 + epoch

    def play(scope: Scope) -> Any:
        model = compiled(scope, loss=Leaned())
        return outcome(model, model.fit(**FIT, callbacks=[Sharpening()]))

    both(play, 3)


def test_plain_attributes_changed_between_steps_by_hand() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope, Leaning)
        said = []
        for i in range(4):
            model.beta = 0.1 * i
            model.inner.factor = 1.0 + i
            said.append(model.train_on_batch(X[:16], Y[:16]))
        said.append(model.predict_on_batch(X[:5]))
        return [said, outcome(model)]

    both(play)


def test_layers_frozen_between_epochs() -> None:
    class Freezing(cb.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].trainable = epoch != 1

    both(lambda scope: fitted(scope, lambda: [Freezing()]))


# --- what is called ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["on_epoch_end", "on_train_batch_end", "on_train_begin"])
def test_models_own_methods_in_mid_fit(tmp_path: Path, when: str) -> None:
    class Asking(cb.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

    def ask(self: Any, *args: Any, **kwargs: Any) -> None:
        model = self.model
        self.heard += [
            model.evaluate(X[:9], Y[:9], verbose=0),
            model.predict(X[:7], verbose=0),
            model.predict_on_batch(X[:1]),
            model.get_weights(),
            model(X[:3]).detach().numpy(),
            model.evaluate(X[:9], Y[:9], verbose=0, return_dict=True),
            model.test_on_batch(X[:5], Y[:5]),
        ]
        model.save(tmp_path / "model.keras")
        self.heard.append(keras.models.load_model(tmp_path / "model.keras").get_weights())

    setattr(Asking, when, ask)

    def play(scope: Scope) -> Any:
        asking = Asking()
        return [fitted(scope, lambda: [asking], epochs=2), asking.heard]

    both(play, 3)


def test_another_model_of_the_strategy_in_mid_fit() -> None:
    """A teacher that predicts while its pupil learns."""

    def play(scope: Scope) -> Any:
        teacher, said = compiled(scope), []
        ask = cb.LambdaCallback(
            on_epoch_end=lambda epoch, logs: said.append(teacher.predict(X[:5], verbose=0))
        )
        return [fitted(scope, lambda: [ask]), said]

    both(play)


def test_exception_then_fit_again() -> None:
    def act(model: Any) -> None:
        raise LookupError("enough")

    def play(scope: Scope) -> Any:
        model = compiled(scope)
        with pytest.raises(LookupError, match=r"^enough$"):
            model.fit(**FIT, callbacks=[AtStep(2, act)])
        half = model.get_weights()
        return [half, outcome(model, model.fit(**FIT)), model.evaluate(X, Y, verbose=0)]

    both(play, shared=False)  # after an error replicas are started anew


def test_stopping_in_mid_epoch() -> None:
    def act(model: Any) -> None:
        model.stop_training = True

    assert len(both(lambda scope: fitted(scope, lambda: [AtStep(5, act)]))[1]["loss"]) == 2


# --- fit after fit ----------------------------------------------------------------------------


def test_fit_goes_on_where_it_stopped() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope, optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
        first = model.fit(**FIT)
        second = model.fit(**FIT, initial_epoch=1)
        return [outcome(model, first), outcome(model, second), int(model.optimizer.iterations)]

    both(play)


def test_optimizer_replaced_between_fits() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.fit(**FIT)
        model.optimizer = keras.optimizers.SGD(0.3)
        model.fit(**FIT)
        model.train_on_batch(X[:16], Y[:16])
        model.optimizer = keras.optimizers.SGD(0.7)
        model.train_on_batch(X[:16], Y[:16])
        model.train_on_batch(X[:16], Y[:16])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), loss=model.loss)
        model.train_on_batch(X[:16], Y[:16])
        model.train_on_batch(X[:16], Y[:16])
        return outcome(model, model.fit(**FIT))

    both(play)


def test_dropouts_rate_changed_between_fits() -> None:
    """With a rate of zero two runs can be compared: it must have reached every replica."""

    def play(scope: Scope) -> Any:
        model = compiled(
            scope,
            lambda: keras.Sequential(
                [keras.Input((8,)), layers.Dense(6), layers.Dropout(0.5), layers.Dense(3)]
            ),
        )
        start = model.get_weights()
        model.fit(**FIT, shuffle=False)
        model.set_weights(start)
        model.optimizer = keras.optimizers.SGD(0.1)
        model.layers[1].rate = 0.0
        return outcome(model, model.fit(**FIT, shuffle=False))

    both(play)


def test_clear_session_between_fits() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.fit(**SHORT)
        keras.backend.clear_session()
        first = outcome(model, model.fit(**SHORT))
        other = compiled(scope)
        return [first, outcome(other, other.fit(**SHORT))]

    both(play)


# --- several models, several strategies -------------------------------------------------------


def test_two_models_in_turn() -> None:
    def play(scope: Scope) -> Any:
        a, b = compiled(scope), compiled(scope)
        said = []
        for i in range(0, 48, 12):
            said.append(a.train_on_batch(X[i : i + 12], Y[i : i + 12]))
            said.append(b.train_on_batch(X[i : i + 5], Y[i : i + 5], return_dict=True))
        said += [a.evaluate(X, Y, verbose=0), b.predict(X, verbose=0)]
        return [said, outcome(a), outcome(b)]

    both(play, 3)


def test_two_models_that_share_a_layer() -> None:
    def play(scope: Scope) -> Any:
        shared = layers.Dense(6, activation="tanh")

        def build() -> Any:
            return keras.Sequential([keras.Input((8,)), shared, layers.Dense(3)])

        a, b = compiled(scope, build), compiled(scope, build)
        for i in range(0, 48, 12):
            a.train_on_batch(X[i : i + 12], Y[i : i + 12])
            b.train_on_batch(X[i : i + 5], Y[i : i + 5])
        return [outcome(a), outcome(b, b.fit(**SHORT)), outcome(a, a.fit(**SHORT))]

    both(play, 3)


def test_two_strategies_in_one_process() -> None:
    def play(scope: Scope) -> Any:
        other = (
            scope
            if scope is not strategy(2).scope and scope.__name__ != "scope"
            else (strategy(3).scope)
        )
        a, b = compiled(scope), compiled(other)
        results = []
        for _ in range(2):
            results += [outcome(a, a.fit(**SHORT)), outcome(b, b.fit(**SHORT))]
        return results

    both(play)


def test_nested_scopes_of_one_strategy() -> None:
    def play(scope: Scope) -> Any:
        with scope():
            model = compiled(scope)
            found = model.fit(**SHORT)
        return outcome(model, found)

    both(play)


def test_model_and_optimizer_made_outside_the_scope() -> None:
    def play(scope: Scope) -> Any:
        model, optimizer = mlp(), keras.optimizers.Adam(0.01, epsilon=1e-3)
        optimizer.build(model.trainable_variables)
        with scope():
            model.compile(optimizer, "mse")
        return outcome(model, model.fit(X, X[:, :3], batch_size=16, verbose=0))

    both(play)


def test_clones_and_copies() -> None:
    def play(scope: Scope) -> Any:
        model = compiled(scope)
        model.fit(**SHORT)
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        loaded = pickle.loads(pickle.dumps(model))
        lines: list[str] = []
        model.summary(print_fn=lambda text, **more: lines.append(text))
        with scope():
            clone.compile(keras.optimizers.SGD(0.1), model.loss)
        return [
            lines[0].count("Dense"),
            clone.predict(X, verbose=0),
            loaded.predict(X, verbose=0),
            outcome(clone, clone.fit(**SHORT)),
            loaded.evaluate(X, Y, verbose=0),
            outcome(model, model.fit(**SHORT)),
        ]

    both(play)


def test_loaded_inside_the_scope(tmp_path: Path) -> None:
    """The optimizer's state goes on too."""

    def play(scope: Scope) -> Any:
        model = compiled(scope, optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
        model.fit(**FIT)
        model.save(tmp_path / "model.keras")
        with scope():
            again = keras.models.load_model(tmp_path / "model.keras")
        return outcome(again, again.fit(**FIT))

    both(play)


# --- nothing stays behind ---------------------------------------------------------------------


def _children(of: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == of:
                found |= {int(entry.name)} | _children(int(entry.name))
    return found


def test_deleted_models_leave_no_process() -> None:
    model = compiled(strategy(2).scope)
    model.fit(**FIT)
    before = _children(os.getpid())
    for _ in range(3):
        model = compiled(strategy(2).scope)
        model.fit(**FIT)
    del model
    gc.collect()
    assert _children(os.getpid()) == before


def _kept(numbers: str = "keras") -> int:
    from stratagem.replicas import follower

    return len(follower.state.things[numbers]) if follower.state is not None else -1


@pytest.mark.slow
def test_deleted_models_leave_no_copies() -> None:
    """A search over a hundred models must not fill the followers' memory."""
    with sg.MirroredStrategy(cpus(2)).scope() as replica_group:
        for _ in range(6):
            model = compiled(replica_group.scope)
            model.fit(X[:16], Y[:16], verbose=0)
            del model
            gc.collect()
        model = compiled(replica_group.scope)
        model.fit(X[:16], Y[:16], verbose=0)
    assert replica_group.run(_kept)[1] <= 2
    replica_group.close()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_loss_that_is_not_finite_is_told_once(
    replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = np.ones((9, 8), "float32"), np.zeros(9)  # batches of 4, 4 and 1 rows
    x[6] = np.nan
    model = compiled(strategy(replicas).scope)
    held = {"validation_data": (x[:4], y[:4]), "shuffle": False, "verbose": 0}
    model.fit(x, y, batch_size=4, epochs=3, **held)
    told = [text for text in caplog.messages if text.startswith("the loss became nan")]
    assert len(told) == 1
    at = "in epoch 1;" if replicas == 1 else "in step 2 of epoch 1, made by rows of replica 1;"
    assert at in told[0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_captured_step_fails_with_keras_own_error(replicas: int) -> None:
    x, y = np.ones((320, 8), "float32"), np.zeros(320, "int64")
    y[250] = 7  # of three classes; the steps before are captured
    model = compiled(strategy(replicas).scope, metrics=[])
    with pytest.raises((IndexError, sg.ReplicaFailed), match=r"Target 7 is out of bounds"):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


SCRIPT = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, stratagem as sg
import torch
torch.set_num_threads(1)

with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")

class Say(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)

model.fit(np.ones((64, 8)), np.ones((64, 3)), epochs=100000, verbose=0, callbacks=[Say()])
"""


@pytest.mark.slow
def test_ctrl_c_in_mid_fit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "epoch 3":
            break
    children = _children(process.pid)
    assert children
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "Interrupted" in text and "Traceback" not in text
    until = time.monotonic() + 30
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in children):
        time.sleep(0.1)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
