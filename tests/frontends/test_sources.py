"""Data that ends early, lists of numbers, and batch sizes that would be ignored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

import stratagem as sg
from stratagem.frontends.sources import ArraySource, Portion
from tests.support import by_hand, data, distance, mlp, moved, strategy


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture(scope="module", params=[1, 2])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


def model_on(on: sg.Strategy) -> sg.Model:
    model = sg.Model(mlp(), on)
    model.compile(optimizer=sgd, loss="cross_entropy")
    return model


def batches(x: Tensor, y: Tensor, size: int = 10) -> Iterator[tuple[Tensor, Tensor]]:
    return ((x[i : i + size], y[i : i + size]) for i in range(0, len(x), size))


# --- generators ----------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_generator_goes_on_over_epochs(some: sg.Strategy) -> None:
    """Six batches make three epochs of two steps, in the order of one device."""
    x, y = data(60)
    model = model_on(some)
    history = model.fit(batches(x, y), epochs=3, steps_per_epoch=2, verbose=0).history
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=10, epochs=1)
    assert moved(mlp(), alone)
    assert distance(alone, model.module) < 2e-6
    assert len(history["loss"]) == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 2}, "epoch 2 got no batch.*steps_per_epoch"),
        ({"epochs": 2, "steps_per_epoch": 4}, r"epoch 2 got 2 of its 4.*epochs \* steps_per_epoch"),
        ({"epochs": 3, "steps_per_epoch": 3}, "epoch 3 got none of its 3"),
        ({"epochs": 1, "steps_per_epoch": 7}, "epoch 1 got 6 of its 7"),
    ],
)
def test_a_generator_that_runs_dry_is_an_error(some: sg.Strategy, options: Any, words: str) -> None:
    x, y = data(60)
    with pytest.raises(sg.UsageError, match=words):
        model_on(some).fit(batches(x, y), **options, verbose=0)


@pytest.mark.timeout(60)
def test_a_generator_of_validation_data_that_runs_dry_is_an_error(some: sg.Strategy) -> None:
    x, y = data(60)
    model = model_on(some)
    model.fit(x, y, validation_data=batches(x, y), verbose=0)
    with pytest.raises(sg.UsageError, match=r"validation_data.*iterated again"):
        model.fit(x, y, validation_data=batches(x, y), epochs=2, verbose=0)


@pytest.mark.timeout(60)
def test_nothing_to_evaluate_is_an_error(some: sg.Strategy) -> None:
    with pytest.raises(sg.UsageError, match="no batch"):
        model_on(some).evaluate(iter(()))


class Once(IterableDataset[Any]):
    """A dataset around an iterator, which can be read once."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.rows = iter(list(zip(x, y, strict=True)))

    def __iter__(self) -> Iterator[Any]:
        return self.rows


@pytest.mark.timeout(60)
def test_a_loader_that_is_empty_the_second_time_is_an_error(some: sg.Strategy) -> None:
    loader = DataLoader(Once(*data(30)), batch_size=10)
    with pytest.raises(sg.UsageError, match=r"epoch 2 got no batch.*iterated again"):
        model_on(some).fit(loader, epochs=2, verbose=0)


# --- lists ---------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_lists_of_numbers_are_arrays(some: sg.Strategy) -> None:
    x, y = data(33)
    model = model_on(some)
    model.fit(
        x.tolist(),
        y.tolist(),
        batch_size=10,
        epochs=2,
        shuffle=False,
        verbose=0,
        sample_weight=[1.0] * 33,
        validation_data=(x.tolist(), y.tolist()),
    )
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=10)
    assert distance(alone, model.module) < 2e-6
    outputs = model.predict([tuple(row) for row in x.tolist()])
    with torch.no_grad():
        assert float((outputs - alone(x)).abs().max()) < 1e-5


@pytest.mark.timeout(60)
def test_batches_of_lists_of_numbers(some: sg.Strategy) -> None:
    x, y = data(33)
    model = model_on(some)
    given = [(rows.tolist(), targets.tolist()) for rows, targets in batches(x, y)]
    model.fit(given, verbose=0)
    model.fit(iter(given), verbose=0)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=10)
    assert distance(alone, model.module) < 2e-6


@pytest.mark.parametrize("odd", [[[1.0, 2.0], [3.0]], [[1.0, None], [2.0, 3.0]]])
def test_lists_that_are_no_array(odd: Any) -> None:
    with pytest.raises(sg.UsageError, match="same number of values"):
        model_on(strategy(1)).fit(odd, [0, 1], verbose=0)


# --- batch sizes ---------------------------------------------------------------------------------


SOURCES: dict[str, Any] = {
    "a DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10),
    "an iterable": batches,
    "list": lambda x, y: list(batches(x, y)),
}


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("kind", list(SOURCES))
def test_a_batch_size_for_what_has_batches_is_refused(kind: str, verb: str) -> None:
    model = model_on(strategy(1))
    with pytest.raises(sg.UsageError, match=r"batch_size=.*leave it out"):
        getattr(model, verb)(SOURCES[kind](*data(30)), batch_size=5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", list(SOURCES))
def test_the_batch_size_of_arrays_leaves_validation_batches_alone(
    some: sg.Strategy, kind: str
) -> None:
    x, y = data(30)
    model = model_on(some)
    validation = SOURCES[kind](x, y)
    history = model.fit(x, y, batch_size=7, validation_data=validation, verbose=0).history
    with torch.no_grad():
        expected = float(F.cross_entropy(model.module(x), y))
    assert history["val_loss"] == [pytest.approx(expected, abs=1e-5)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [2, 3])
def test_two_or_three_validation_batches_are_no_x_and_y(some: sg.Strategy, count: int) -> None:
    x, y = data(10 * count)
    model = model_on(some)
    history = model.fit(x, y, validation_data=list(batches(x, y)), verbose=0).history
    with torch.no_grad():
        expected = float(F.cross_entropy(model.module(x), y))
    assert history["val_loss"] == [pytest.approx(expected, abs=1e-5)]


# --- samplers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict", "validation_data"])
def test_a_distributed_sampler_is_refused(verb: str) -> None:
    x, y = data(30)
    dataset = TensorDataset(x, y)
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = model_on(strategy(1))
    with pytest.raises(sg.UsageError, match=r"DistributedSampler.*leave the sampler out"):
        if verb == "validation_data":
            model.fit(x, y, validation_data=loader, verbose=0)
        getattr(model, verb)(loader, verbose=0)


# --- workers that persist ------------------------------------------------------------------------


class Numbered(Dataset[Any]):
    """Rows that tell which process read them."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return torch.cat([self.x[i], torch.tensor([float(i), float(os.getpid())])])


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.seen: list[list[list[float]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x[:, 6:].tolist())
        return self.layer(x[:, :6]).squeeze(1)


@pytest.mark.timeout(60)
def test_persistent_workers_shuffle_as_on_one_device(some: sg.Strategy) -> None:
    """The chief's share is the first half of each batch; 3 epochs, in two calls of fit."""
    dataset = Numbered(data(12)[0])

    def loader() -> DataLoader[Any]:
        dice = torch.Generator().manual_seed(5)
        return DataLoader(
            dataset,
            batch_size=4,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            generator=dice,
        )

    one = loader()
    expected = [batch[:, 6].tolist() for _ in range(3) for batch in one]
    module, ours = Remembering(), loader()
    model = sg.Model(module, some)
    model.compile(optimizer=sgd, loss=lambda out, _: out.square())
    model.fit(ours, epochs=2, verbose=0)
    model.fit(ours, verbose=0)
    each = 4 // some.num_replicas_in_sync
    assert [[row[0] for row in part] for part in module.seen] == [ids[:each] for ids in expected]
    assert len({row[1] for part in module.seen for row in part}) == 1, "workers were restarted"
    assert expected[:3] != expected[3:6]


# --- standbys ------------------------------------------------------------------------------------


def test_a_standby_reads_the_rows_of_no_step_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby gets the same rows, but does not read those of skipped steps."""
    x, y = data(60)
    source, read = ArraySource(x, y, None, 10, shuffle=True), list[int]()
    plain = ArraySource._cut
    monkeypatch.setattr(
        ArraySource, "_cut", lambda self, *given: (read.append(given[2]), plain(self, *given))[1]
    )

    def portions(live: bool) -> list[Portion]:
        collective = SimpleNamespace(live=live)
        replica: Any = SimpleNamespace(
            device=torch.device("cpu"), index=1, count=3, collective=collective
        )
        return list(source.portions(replica, 0))

    expected = portions(live=True)
    read.clear()
    found = portions(live=False)
    assert not read
    assert torch.equal(found[4].x, expected[4].x) and torch.equal(found[4].y, expected[4].y)
    assert (found[4].examples, found[4].total) == (expected[4].examples, 10) and read == [4]
