"""Unusual models, losses and data: the result of one device, or a refusal."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.frontends.hooks import refuse_shared
from tests.clock import PATIENCE
from tests.spread import assert_work, watched
from tests.support import data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(60)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def both(
    three: sg.MirroredStrategy,
    module: nn.Module,
    loss: Any,
    fit: Callable[[], dict[str, Any]],
    *,
    optimizer: Any = sgd,
    **how: Any,
) -> tuple[sg.Model, sg.Model]:
    """Train on one device and on three; both must have trained, with equal results."""

    def train(where: sg.Strategy | None) -> sg.Model:
        model = sg.Model(copy.deepcopy(module), where)
        model.compile(optimizer, loss, **how)
        torch.manual_seed(2)
        model.fit(**{"verbose": 0, "epochs": 2, "shuffle": False, **fit()})
        return model

    one, alone = watched(lambda: train(None))
    several, spread = watched(lambda: train(three), three)
    assert_work(alone, spread)
    assert distance(one.module, module) > 1e-3
    assert distance(one.module, several.module) < 1e-5
    return one, several


def assert_history(one: sg.Model, several: sg.Model) -> None:
    ours, theirs = (np.array(m.history.history["loss"]) for m in (several, one))
    assert np.abs(ours - theirs).max() < 1e-5


# --- losses and their rows -----------------------------------------------------------------------


class OwnLoss(nn.Module):
    """Returns its loss, as many language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def own_loss(output: Tensor, _: Any) -> Tensor:
    return output


def test_a_model_that_returns_its_loss(three: sg.MirroredStrategy) -> None:
    x, _ = data(47)
    one, several = both(three, OwnLoss(), own_loss, lambda: {"x": x, "batch_size": 10})
    assert_history(one, several)
    results = [m.evaluate(x, batch_size=10, verbose=0)["loss"] for m in (one, several)]
    assert abs(results[0] - results[1]) < 1e-5


class Threefold(nn.Module):
    """Returns three rows for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).reshape(-1, 4)


def flat(batch: list[Any]) -> Any:
    return torch.stack([x for x, _ in batch]), torch.cat([y for _, y in batch])


def test_targets_of_several_rows_an_example(three: sg.MirroredStrategy) -> None:
    x, _ = data(47)
    pairs = [(row, torch.full((3, 4), float(i % 5))) for i, row in enumerate(x)]
    loader = lambda: {"x": DataLoader(pairs, 10, collate_fn=flat), "shuffle": True}  # type: ignore[arg-type]  # noqa: E731
    both(three, Threefold(), "mse", loader)


def test_targets_of_a_row_for_each_time(three: sg.MirroredStrategy) -> None:
    def by_time(batch: list[Any]) -> Any:
        return torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch], 1)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(6, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).t()

    x, _ = data(47)
    pairs = [(row, torch.full((7,), float(i % 5))) for i, row in enumerate(x)]
    loader = lambda: {"x": DataLoader(pairs, 10, collate_fn=by_time), "shuffle": True}  # type: ignore[arg-type]  # noqa: E731
    both(three, Turned(), "mse", loader)


def test_targets_that_some_examples_have_more_of_are_refused(three: sg.MirroredStrategy) -> None:
    x, _ = data(47)
    pairs = [(row, torch.ones(1 + i % 3, 4)) for i, row in enumerate(x)]
    model = sg.Model(Threefold(), three)
    model.compile(sgd, lambda output, target: F.mse_loss(output[: len(target)], target))
    with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match="pad them"):
        model.fit(DataLoader(pairs, 10, collate_fn=flat), verbose=0)  # type: ignore[arg-type]


def test_class_weights_and_a_target_that_is_no_class(three: sg.MirroredStrategy) -> None:
    x, y = data(47)
    y[::5] = 255
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]), ignore_index=255)
    one, several = both(three, mlp(), loss, lambda: {"x": x, "y": y, "batch_size": 10})
    with torch.no_grad():
        expected = float(loss(one.module(x), y))
    for model in (one, several):
        assert abs(model.evaluate(x, y, batch_size=47, verbose=0)["loss"] - expected) < 1e-5


def test_sample_weights_in_a_column(three: sg.MirroredStrategy) -> None:
    x, y = data(47)
    weight = torch.rand(47)
    column, _ = both(
        three,
        mlp(),
        "cross_entropy",
        lambda: {"x": x, "y": y, "sample_weight": weight[:, None], "batch_size": 10},
    )
    row, _ = both(
        three,
        mlp(),
        "cross_entropy",
        lambda: {"x": x, "y": y, "sample_weight": weight, "batch_size": 10},
    )
    assert distance(column.module, row.module) == 0
    with pytest.raises(sg.UsageError, match="one number for each example"):
        column.fit(x, y, sample_weight=torch.rand(47, 4), verbose=0)


def test_a_streamed_tensor_without_a_row_for_each_example(three: sg.MirroredStrategy) -> None:
    model = sg.Model(mlp(), three)
    model.compile(sgd, "cross_entropy")
    x, y = data(10)
    with pytest.raises(sg.NotDistributable, match="of 10 and of 12 rows"):
        model.fit([({"x": x, "table": torch.ones(12)}, y)], verbose=0)


# --- optimizers ----------------------------------------------------------------------------------


class Set(sg.callbacks.Callback):
    """Sets the optimizer's settings to values of unusual types."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.param_groups[0].update(self.settings)


@pytest.mark.parametrize("settings", [{"lr": np.float32(0.0)}, {"betas": [0.1, 0.2]}], ids=str)
def test_settings_of_any_type_are_followed(
    three: sg.MirroredStrategy, settings: dict[str, Any]
) -> None:
    x, y = data(47)
    adam = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    fit = lambda: {"x": x, "y": y, "batch_size": 10, "callbacks": [Set(**settings)]}  # noqa: E731
    both(three, mlp(), "cross_entropy", fit, optimizer=adam)


def test_a_gradient_that_is_no_number_spoils_everything_alike(three: sg.MirroredStrategy) -> None:
    class Spoiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = mlp(), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 0 * self.scale.sqrt()  # 0, and its gradient is no number

    x, y = data(47)
    broken = []
    for where in (None, three):
        model = sg.Model(Spoiled(), where)
        model.compile(sgd, "cross_entropy", clip_norm=1.0)
        model.fit(x, y, batch_size=47, verbose=0)
        broken.append([int(p.isnan().sum()) for p in model.module.parameters()])
    assert broken[0] == broken[1] and sum(broken[0])


def test_a_replaced_step_is_refused_and_a_schedulers_is_not(three: sg.MirroredStrategy) -> None:
    x, y = data(20)
    model = sg.Model(mlp(), three)
    model.compile(sgd, "cross_entropy")
    optimizer: Any = model.optimizer
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.fit(x, y, verbose=0)
    plain = optimizer.step
    optimizer.step = lambda: plain()
    with pytest.raises(sg.NotDistributable, match="subclass"):
        model.fit(x, y, verbose=0)


def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path: Path) -> None:
    x, y = data(20)
    model = sg.Model(mlp())
    model.compile(sgd, "cross_entropy")
    optimizer: Any = model.optimizer
    optimizer.param_groups[0]["lr"] = np.float64(0.05)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "m")
    other = sg.Model(mlp())
    other.compile(sgd, "cross_entropy")
    other.load(tmp_path / "m")
    assert other.optimizer.param_groups[0]["lr"] == 0.05  # type: ignore[union-attr]


# --- models --------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Has a frozen integer parameter, and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.shifts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("ones", torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.ones + self.shifts


def test_whole_parameters_and_expanded_buffers(three: sg.MirroredStrategy) -> None:
    x, y = data(47)
    both(three, Odd(), "cross_entropy", lambda: {"x": x, "y": y, "batch_size": 10})


class Masks(nn.Module):
    """Has buffers that share memory and are only read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        mask = torch.ones(8)
        self.register_buffer("mask", mask)
        self.register_buffer("some", mask[:4])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.some


def test_buffers_may_share_memory(three: sg.MirroredStrategy) -> None:
    x, y = data(47)
    both(three, Masks(), "cross_entropy", lambda: {"x": x, "y": y, "batch_size": 10})


@pytest.mark.parametrize("other", ["parameter", "buffer"])
def test_a_view_of_a_trained_parameter_is_refused(other: str) -> None:
    module = mlp()
    view = module.get_parameter("0.weight").data[3:]
    if other == "parameter":
        module.register_parameter("other", nn.Parameter(view))
    else:
        module.register_buffer("other", view)
    with pytest.raises(sg.NotDistributable, match=r"0\.weight.*other"):
        refuse_shared(module)


def test_parameters_that_share_memory_are_refused(three: sg.MirroredStrategy) -> None:
    class Mirror(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)
            self.up.weight = nn.Parameter(self.down.weight.data.t())

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.down(x))

    x, _ = data(20)
    model = sg.Model(Mirror(), three)
    model.compile(sgd, "mse")
    with pytest.raises(sg.NotDistributable, match=r"down\.weight.*share memory|up\.weight.*share"):
        model.fit(x, x, verbose=0)


def test_complex_parameters_do_not_travel_in_sixteen_bits() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    x, y = data(20)
    where = strategy(2, wire="bfloat16")
    model = sg.Model(Wave(), where)
    model.compile(sgd, "cross_entropy")
    with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match="complex"):
        model.fit(x, y, verbose=0)
    where.close()


def test_autocast_around_fit_is_refused(three: sg.MirroredStrategy) -> None:
    x, y = data(20)
    model = sg.Model(mlp(), three)
    model.compile(sgd, "cross_entropy")
    with torch.autocast("cpu"), pytest.raises(sg.UsageError, match="precision="):
        model.fit(x, y, verbose=0)


# --- around it -----------------------------------------------------------------------------------


class Unmeasured:
    """A batch sampler without a length, which torch allows."""

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, 47, 10):
            yield list(range(start, min(start + 10, 47)))


class Endless:
    """A sampler without a length, from which torch makes batches."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(47))


def test_a_sampler_without_a_length(three: sg.MirroredStrategy) -> None:
    x, y = data(47)
    both(
        three,
        mlp(),
        "cross_entropy",
        lambda: {
            "x": DataLoader(TensorDataset(x, y), 10, sampler=Endless()),  # type: ignore[arg-type]
            "shuffle": True,
        },
    )


def test_a_batch_sampler_without_a_length(three: sg.MirroredStrategy) -> None:
    x, y = data(47)
    both(
        three,
        mlp(),
        "cross_entropy",
        lambda: {
            "x": DataLoader(TensorDataset(x, y), batch_sampler=Unmeasured()),  # type: ignore[arg-type]
            "shuffle": True,
        },
    )


def test_the_best_weights_are_restored_when_training_ends_by_itself(
    three: sg.MirroredStrategy,
) -> None:
    x, y = data(47)
    for where in (None, three):
        model = sg.Model(mlp(), where)
        model.compile(lambda p: torch.optim.SGD(p, lr=5.0), "cross_entropy")
        stop = sg.callbacks.EarlyStopping(patience=50, restore_best_weights=True)
        history = model.fit(
            x, y, epochs=8, batch_size=10, validation_data=(x, y), callbacks=[stop], verbose=0
        ).history
        best = min(history["val_loss"])
        assert history["val_loss"][-1] > best + 0.01
        assert abs(model.evaluate(x, y, verbose=0)["loss"] - best) < 1e-4


def test_two_threads_take_turns() -> None:
    x, y = data(47)
    losses: list[float] = []
    start = mlp()  # its numbers are drawn from dice that threads share

    def work() -> None:
        where = strategy(2)
        model = sg.Model(copy.deepcopy(start), where)
        model.compile(sgd, "cross_entropy")
        losses.append(model.fit(x, y, batch_size=10, shuffle=False, verbose=0).history["loss"][0])
        where.close()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(losses) == 2 and losses[0] == losses[1]
    work()  # and the process is as it was
    assert losses[2] == losses[0]


def test_a_frozen_model_is_evaluated_and_not_trained(three: sg.MirroredStrategy) -> None:
    """As in torch, training it, or making an optimizer of no parameters, is an error."""
    x, y = data(20)
    for module in (mlp().requires_grad_(False), nn.Softmax(-1)):
        model = sg.Model(module, three)
        model.compile("sgd", "cross_entropy")
        here = F.cross_entropy(module(x), y)
        assert abs(model.evaluate(x, y, batch_size=20)["loss"] - float(here)) < 1e-6
        assert torch.allclose(model.predict(x, batch_size=20), module(x), atol=1e-6)
        with pytest.raises(sg.errors.UsageError, match="unfreeze what shall be trained"):
            model.fit(x, y, verbose=0)
