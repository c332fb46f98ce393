"""Captured steps in Keras' loop without idle work: the same bits, and no callback is left out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

from stratagem.compat.torch_names import traced
from stratagem.frontends.keras import (
    captured_step,
    driver,
    quiet_loop,
    step_graph,
    step_loop,
)
from stratagem.frontends.keras.callback_needs import CallbackNeeds
from stratagem.frontends.keras.step_graph import trim
from stratagem.frontends.keras.step_loop import PlannedUpdate, StepLoop
from stratagem.state.keras_stepper import fuse
from tests.keras_support import apart, digits, moved, strategy, train

X, Y = digits(100)
#: from 3.16 on Keras draws the order of rows from a generator of its own
OWN_DICE = not keras.__version__.startswith(("3.12", "3.13", "3.14", "3.15"))
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp() -> Any:
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(3)])


def normalised() -> Any:
    hidden = [layers.Dense(16), layers.BatchNormalization(), layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *hidden])


def dropping() -> Any:
    return keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), layers.Dense(3)])


def adam(**more: Any) -> dict[str, Any]:
    optimizer = keras.optimizers.Adam(0.003, **more)
    return {"optimizer": optimizer, "loss": LOGITS, "metrics": ["accuracy"]}


class Seen:
    """Counts planned updates, slices, and steps made at once."""

    def __init__(self) -> None:
        self.updates = self.slices = 0
        #: how many steps were made at once
        self.loops: list[int] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    update, loop, cut = PlannedUpdate.apply, StepLoop.run, quiet_loop.SlicedBatches

    def applied(self: Any, gradients: Any) -> bool:
        found.updates += 1
        return update(self, gradients)

    def looped(self: Any, batches: Any, update: Any) -> bool:
        made = loop(self, batches, update)
        if made:
            found.loops.append(len(batches))
            found.updates += len(batches)
        return made

    def sliced(loader: Any) -> Any:
        found.slices += 1
        return cut(loader)

    monkeypatch.setattr(captured_step, "AFTER", 2)
    monkeypatch.setattr(captured_step, "LONG_STEP", 60.0)
    monkeypatch.setattr(PlannedUpdate, "apply", applied)
    monkeypatch.setattr(captured_step, "AT_ONCE", 100.0)
    monkeypatch.setattr(StepLoop, "run", looped)
    monkeypatch.setattr(quiet_loop, "SlicedBatches", sliced)
    return found


def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn every short cut off but captured steps."""
    monkeypatch.setattr(driver.Call, "quietly", lambda *_: nullcontext())
    monkeypatch.setattr(PlannedUpdate, "of", lambda *_: None)
    monkeypatch.setattr(step_graph, "trim", lambda graph: None)


def everything(model: Any) -> list[Any]:
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


def rates() -> list[Any]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch))]


@pytest.mark.parametrize(
    ("build", "more", "cuts"),
    [
        (mlp, {"callbacks": rates(), "validation_split": 0.2}, (9, 3)),
        (mlp, {"shuffle": False, "sample_weight": np.linspace(0.1, 2, 100)}, (9, 3)),
        (mlp, {"shuffle": "batch"}, (9, 3 if OWN_DICE else 0)),
        (mlp, {"steps_per_epoch": 5, "epochs": 1}, (2, 0)),
        (dropping, {}, (0, 3)),
        (normalised, {"epochs": 2}, (3, 2)),
    ],
)
def test_every_bit_is_that_of_keras_loop(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, build: Any, more: Any, cuts: tuple[int, ...]
) -> None:
    fit = {"x": X, "y": Y, "batch_size": 16, "epochs": 3, **more}
    ours, history = train(build, adam, fit, strategy(1))
    drawn = torch.get_rng_state()
    found = seen.updates, seen.slices
    assert all(a >= b if b else not a for a, b in zip(found, cuts, strict=True)), found
    assert (max(seen.loops, default=0) > 1) == all(cuts), seen.loops
    loud(monkeypatch)
    theirs, told = train(build, adam, fit, strategy(1))
    assert torch.equal(drawn, torch.get_rng_state())
    assert (seen.updates, seen.slices) == found
    assert moved(build, ours) and history == told
    pairs = zip(everything(ours), everything(theirs), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


class Reads(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls `train_on_batch` at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rows = torch.as_tensor(X[:16]), torch.as_tensor(Y[:16])  # arrays are not captured
        self.told.append(self.model.train_on_batch(*rows, return_dict=True))


class Listens(Reads):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.told.append(dict(logs))


@pytest.mark.parametrize("kind", [Reads, Listens])
def test_who_listens_is_told(seen: Seen, kind: type[Reads]) -> None:
    calls = [kind(), kind()]
    fit = {"x": X, "y": Y, "batch_size": 16, "epochs": 2, "shuffle": False}
    one, _ = train(mlp, adam, {**fit, "callbacks": [calls[0]]})
    ours, _ = train(mlp, adam, {**fit, "callbacks": [calls[1]]}, strategy(1))
    assert bool(seen.loops) == (kind is Reads) and apart(one, ours) < 1e-6
    assert len(calls[0].told) == len(calls[1].told) == 2 * (1 if kind is Reads else 8)
    for mine, theirs in zip(calls[1].told, calls[0].told, strict=True):
        assert {k: float(v) for k, v in mine.items()} == pytest.approx(theirs, abs=1e-6)


def test_the_progress_bar_moves(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    with strategy(1).scope():
        model = mlp()
        model.compile(**adam())
    model.fit(X, Y, batch_size=10, epochs=1, verbose=1)
    assert "10/10" in capsys.readouterr().out and seen.updates and not seen.loops


def constrained() -> Any:
    last = layers.Dense(3, kernel_constraint="max_norm")
    return keras.Sequential([keras.Input((8,)), last])


@pytest.mark.parametrize(
    ("build", "more"),
    [
        (mlp, {"clipnorm": 0.1}),
        (mlp, {"clipvalue": 0.1}),
        (mlp, {"global_clipnorm": 0.1}),
        (mlp, {"weight_decay": 0.1}),
        (mlp, {"use_ema": True}),
        (mlp, {"gradient_accumulation_steps": 2}),
        (mlp, {"loss_scale_factor": 8.0}),
        (mlp, {"amsgrad": True}),
        (mlp, {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)}),
        (constrained, {}),
    ],
)
def test_an_update_that_is_more_than_a_step_is_the_optimizers(build: Any, more: Any) -> None:
    model = build()
    optimizer = keras.optimizers.Adam(**more)
    fuse(optimizer)
    optimizer.build(model.trainable_variables)
    assert PlannedUpdate.of(optimizer, model.trainable_variables) is None
    plain = keras.optimizers.Adam()
    fuse(plain)
    plain.build(model.trainable_variables)
    constraint = build is constrained
    assert (PlannedUpdate.of(plain, model.trainable_variables) is None) == constraint
    plain.__dict__["apply"] = None  # somebody else makes the update
    assert PlannedUpdate.of(plain, model.trainable_variables) is None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_loop_with_other_numbers_is_not_used(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    settings = PlannedUpdate.settings

    def off(self: Any, steps: int, after: int = 0) -> Any:
        return settings(self, steps, after + wrong)

    monkeypatch.setattr(PlannedUpdate, "settings", off)
    train(mlp, adam, {"x": X, "y": Y, "batch_size": 10}, strategy(1))
    assert bool(seen.loops) != wrong and seen.updates > 5


@pytest.mark.parametrize("fastest", [1, 2])
def test_a_loop_runs_on_the_threads_that_are_faster(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, fastest: int
) -> None:
    given, used, count, ticks = torch.get_num_threads(), set(), PlannedUpdate.count, [0.0]

    def clock() -> float:
        ticks[0] += 1.0 if torch.get_num_threads() == fastest else 2.0
        return ticks[0]

    def counted(self: Any, steps: int) -> None:
        used.add(torch.get_num_threads())
        count(self, steps)

    monkeypatch.setattr(step_loop.time, "perf_counter", clock)
    monkeypatch.setattr(PlannedUpdate, "count", counted)
    torch.set_num_threads(2)
    try:
        train(mlp, adam, {"x": X, "y": Y, "batch_size": 10}, strategy(1))
        assert torch.get_num_threads() == 2 and used == {fastest} and max(seen.loops) > 5
    finally:
        torch.set_num_threads(given)


def test_who_listens_to_gradients_hears_each(seen: Seen) -> None:
    with strategy(1).scope():
        model = mlp()
        model.compile(**adam())
    model.fit(X, Y, batch_size=10, verbose=0)
    before, heard = len(seen.loops), []
    model.layers[0].kernel.value.register_hook(lambda gradient: heard.append(gradient.clone()))
    model.fit(X, Y, batch_size=10, verbose=0)
    assert before and len(seen.loops) == before and len(heard) == 10
    assert torch.equal(heard[-1], model.layers[0].kernel.value.grad)


def test_an_epoch_that_is_cut_short_has_its_own_steps(seen: Seen) -> None:
    keras.config.set_max_steps_per_epoch(5)
    try:
        ours, _ = train(mlp, adam, {"x": X, "y": Y, "batch_size": 10, "epochs": 2}, strategy(1))
    finally:
        keras.config.set_max_steps_per_epoch(None)
    assert int(ours.optimizer.iterations) == 10 and not seen.slices


def test_steps_before_one_that_fails_are_made(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for quiet in (True, False):
        if not quiet:
            loud(monkeypatch)
        with strategy(1).scope():
            keras.utils.set_random_seed(1)
            model = normalised()
            model.compile(**adam())
        model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
        with pytest.raises(Exception, match="out of bounds"):
            model.fit(
                X, np.where(np.arange(100) < 70, Y, 7), batch_size=10, shuffle=False, verbose=0
            )
        found.append(everything(model))
        assert int(model.optimizer.iterations) == 17 and seen.loops == [7, 1]
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def small() -> Any:
    with strategy(1).scope():
        keras.utils.set_random_seed(1)
        model = normalised()
        model.compile(**adam())
    model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    return model


def test_ctrl_c_leaves_what_was_there_before(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt when the program of several steps has ended."""
    model, run = small(), StepLoop.run
    before = everything(model)

    def interrupted(self: Any, batches: Any, update: Any) -> bool:
        program = self._program

        def then_raises(*given: Any) -> Any:
            program(*given)
            raise KeyboardInterrupt

        self._program = then_raises
        try:
            return run(self, batches, update)
        finally:
            self._program = program

    monkeypatch.setattr(StepLoop, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(before, everything(model), strict=True))


def test_calls_in_between_have_no_batch_trained_twice(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler, or another thread, predicts while a fit runs."""
    model, run = small(), StepLoop.run

    def noted(self: Any, batches: Any, update: Any) -> bool:
        asked.append(len(batches))
        return run(self, batches, update)

    asked: list[int] = []
    monkeypatch.setattr(StepLoop, "run", noted)
    step = captured_step.CapturedStep.__call__

    def called(self: Any, data: Any, share: Any = None) -> Any:
        if asked[1:]:
            model.predict_on_batch(X[:4])
        return step(self, data, share)

    monkeypatch.setattr(captured_step.CapturedStep, "__call__", called)
    model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 20 and asked == [1, 9]


def test_after_a_fit_that_failed_logs_are_read(seen: Seen) -> None:
    with strategy(1).scope():
        model = mlp()
        model.compile(**adam())
    rows = torch.as_tensor(X[:16]), torch.as_tensor(Y[:16])
    for _ in range(3):
        model.train_on_batch(*rows)
    labels = np.where(np.arange(20) < 16, Y[:20], 7)  # of a last, smaller batch: no such class
    with pytest.raises(IndexError):
        model.fit(X[:20], labels, batch_size=16, shuffle=False, verbose=0)
    found = model.train_on_batch(*rows, return_dict=True)
    assert seen.updates and float(found["loss"]) > 0


def test_what_is_the_same_each_time_runs_once() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        literal = torch.arange(3.0).mul(2.0)
        return [x.sin() + literal, x.sin().detach() * literal, literal + 1.0]

    def writing(x: torch.Tensor) -> list[torch.Tensor]:
        first = x.sin()
        return [first.add_(1.0), x.sin()]

    x = torch.randn(3)
    graph = traced(step, [x])
    before = [each.clone() for each in graph(x)]
    trim(graph)
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert sorted(name.split(".")[1] for name in names) == ["add", "add", "mul", "sin"]
    assert all(torch.equal(a, b) for a, b in zip(graph(x), before, strict=True))
    first = graph(x)[2]
    first.zero_()  # an output is nobody's literal
    assert torch.equal(graph(x)[2], before[2])
    graph = traced(writing, [x])
    code = graph.code
    trim(graph)
    assert graph.code == code


@pytest.mark.parametrize("same", [False, True])
def test_small_products_take_copies_where_bits_stay(
    monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    monkeypatch.setattr(step_graph, "_ARM", True)
    monkeypatch.setattr(step_graph, "_same_bits", lambda *_: same)
    x, small, large = torch.randn(32, 10), torch.randn(64, 10), torch.randn(1000, 10)
    graph = traced(lambda x, a, b: [x @ a.t(), x @ b.t()], [x, small, large])
    trim(graph)
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert sum("clone" in name for name in names) == same
    torch.testing.assert_close(graph(x, small, large)[0], x @ small.t())


class Writes(keras.Sequential):  # type: ignore[misc]
    """A step that changes the labels of later rows."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.__dict__["seen"].append(float(data[1].mean()))
        self.__dict__["labels"] *= 0.5
        return logs


def writing() -> Any:
    model = Writes([keras.Input((8,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.__dict__.update(seen=[], labels=np.ones((64, 1), "float32"))
    return model


class FitsAnother(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.other.fit(X[:64], self.other.labels, batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_of_the_users_may_write_into_the_data(nested: bool) -> None:
    other = writing()  # no strategy knows it
    with strategy(1).scope():
        model = mlp() if nested else (other := writing())
        if nested:
            model.compile(**adam())
    if nested:
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[FitsAnother(other)])
    else:
        model.fit(X[:64], model.labels, batch_size=8, shuffle=False, verbose=0)
    assert other.seen == [0.5**step for step in range(8)]


class Teaches(keras.Model):  # type: ignore[misc]
    """A step that trains another model, and keeps its logs."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other, self.own = other, layers.Dense(1)
        self.__dict__["told"] = []

    def call(self, x: Any) -> Any:
        return self.own(x)

    def train_step(self, data: Any) -> Any:
        self.__dict__["told"].append(self.other.train_on_batch(*data, return_dict=True))
        return {"x": 0.0}


def test_a_call_in_a_step_returns_its_logs(seen: Seen) -> None:
    with strategy(1).scope():
        other = mlp()
        other.compile(**adam())
        model = Teaches(other)
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=10, verbose=0)
    assert seen.updates and len(model.told) == 10
    assert all(float(logs["loss"]) > 0 for logs in model.told), model.told


def test_callbacks_may_lie_in_anything() -> None:
    for callbacks in (Listens(), [[Listens()], None], {"a": Listens()}):
        assert CallbackNeeds.of(callbacks).train_logs
    assert CallbackNeeds.of(None) == CallbackNeeds()


class FitsBetween(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other, self.ends = other, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.other.fit(X[:8], Y[:8], verbose=0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends += 1


def test_a_fit_inside_leaves_the_end_of_a_batch() -> None:
    other = mlp()
    other.compile(**adam())
    with strategy(1).scope():
        model = mlp()
        model.compile(**adam())
    between = FitsBetween(other)
    model.fit(X[:32], Y[:32], batch_size=8, verbose=0, callbacks=[between])
    assert between.ends == 4


def test_batches_of_other_strides_are_steps_of_their_own(seen: Seen) -> None:
    with strategy(1).scope():
        hidden = [keras.Input((6, 6)), layers.Flatten(), layers.Dense(3)]
        model = keras.Sequential(hidden)
        model.compile(**adam())
    x, y = torch.randn(8, 6, 6), torch.zeros(8, dtype=torch.long)
    for rows in (*[x] * 4, x.transpose(1, 2)):
        model.train_on_batch(rows, y)
    assert seen.updates
