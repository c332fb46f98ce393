"""The order of the data is that of plain torch on one device, for any number of replicas."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import stratagem as sg
from stratagem.frontends.server_steps import BatchScheduler
from stratagem.frontends.sources import DatasetSource
from stratagem.rules.tickets import Ticket
from stratagem.servers.client import Assignment
from tests.support import data, distance, moved, strategy

pytestmark = pytest.mark.timeout(60)

X, Y = data(41)
ROWS = TensorDataset(X, Y)


@pytest.fixture(scope="module", params=[1, 2, 3])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 4)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def model_on(on: sg.Strategy, module: nn.Module | None = None) -> sg.Model:
    model = sg.Model(module or net(), on)
    model.compile(sgd, "cross_entropy")
    return model


def learn(module: nn.Module, batches: Any) -> None:
    """Train on one device, in plain torch."""
    optimizer = sgd(module.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()


def draw() -> int:
    """Draw the seed that `fit` draws before it begins."""
    return int(torch.empty((), dtype=torch.int64).random_().item()) >> 2


def dice(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(alone: nn.Module, model: sg.Model) -> None:
    assert moved(net(), alone)
    assert distance(alone, model.module) < 1e-6


# --- epochs that are left early ------------------------------------------------------------------


class Halves(BatchSampler):
    """A custom batch sampler, which draws random numbers in mid-epoch."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, 40, 4):
            yield (start + torch.randperm(4, generator=self.generator)).tolist()

    def __len__(self) -> int:
        return 10


LOADERS: dict[str, Any] = {
    "a generator": lambda: DataLoader(ROWS, batch_size=4, shuffle=True, generator=dice()),
    "no generator": lambda: DataLoader(ROWS, batch_size=4, shuffle=True),
    "four batches": lambda: DataLoader(ROWS, batch_size=12, shuffle=True, generator=dice()),
    "three batches": lambda: DataLoader(
        ROWS, batch_size=12, shuffle=True, drop_last=True, generator=dice()
    ),
    "three batches and no rest": lambda: DataLoader(
        TensorDataset(X[:36], Y[:36]), batch_size=12, shuffle=True, generator=dice()
    ),
    "two batches and a rest": lambda: DataLoader(
        ROWS, batch_size=16, shuffle=True, generator=dice()
    ),
    "replacement": lambda: DataLoader(
        ROWS, batch_size=16, sampler=RandomSampler(ROWS, True, 70, generator=dice())
    ),
    "more than once": lambda: DataLoader(
        ROWS, batch_size=16, sampler=RandomSampler(ROWS, False, 90, generator=dice())
    ),
    "a part": lambda: DataLoader(ROWS, batch_size=4, sampler=SubsetRandomSampler(range(3, 33))),
    "weights": lambda: DataLoader(
        ROWS, batch_size=4, sampler=WeightedRandomSampler([1.0, 2.0] * 20, 30, generator=dice())
    ),
    "of one's own": lambda: DataLoader(ROWS, batch_sampler=Halves(dice())),
    "workers": lambda: DataLoader(
        ROWS, batch_size=4, shuffle=True, generator=dice(), num_workers=1
    ),
}


@pytest.mark.parametrize("kind", list(LOADERS))
def test_epochs_cut_short_shuffle_as_on_one_device(some: sg.Strategy, kind: str) -> None:
    module, model = net(), model_on(some)
    torch.manual_seed(7)
    model.fit(LOADERS[kind](), epochs=3, steps_per_epoch=3, verbose=0)
    after = torch.rand(())
    torch.manual_seed(7)
    draw()
    loader = LOADERS[kind]()
    for _ in range(3):
        learn(module, islice(loader, 3))
    assert torch.rand(()) == after
    check(module, model)


def test_epochs_of_a_dataset_cut_short(some: sg.Strategy) -> None:
    module, model = net(), model_on(some)
    torch.manual_seed(7)
    model.fit(ROWS, batch_size=4, epochs=3, steps_per_epoch=3, verbose=0)
    torch.manual_seed(7)
    loader = DataLoader(ROWS, batch_size=4, shuffle=True, generator=dice(draw()))
    for _ in range(3):
        learn(module, islice(loader, 3))
    check(module, model)


class Stop(sg.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.model.stop_training = True


def test_after_a_stop_in_mid_epoch(some: sg.Strategy) -> None:
    module, model = net(), model_on(some)
    ours, loader = LOADERS["a generator"](), LOADERS["a generator"]()
    model.fit(ours, callbacks=[Stop()], verbose=0)
    model.fit(ours, verbose=0)
    learn(module, islice(loader, 3))
    learn(module, loader)
    check(module, model)


@torch.no_grad()
def test_evaluations_cut_short(some: sg.Strategy) -> None:
    model, ours, loader = model_on(some), LOADERS["a generator"](), LOADERS["a generator"]()
    for _ in range(2):
        found = model.evaluate(ours, steps=2, verbose=0)["loss"]
        losses = [float(F.cross_entropy(model.module(x), y)) for x, y in islice(loader, 2)]
        assert found == pytest.approx(sum(losses) / 2, abs=1e-6)


def prepared(on: sg.Strategy, loader: DataLoader[Any]) -> nn.Module:
    module = net()
    torch.manual_seed(7)
    module, optimizer, batches = on.prepare(module, sgd(module.parameters()), loader)
    for _ in range(3):
        for number, (x, y) in enumerate(batches):
            if number == 3:
                break
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
    return module


@pytest.mark.parametrize("kind", ["a generator", "no generator", "four batches", "of one's own"])
def test_a_prepared_loop_that_is_left(some: sg.Strategy, kind: str) -> None:
    found = some.run(prepared, some, LOADERS[kind]())[0]
    module = net()
    torch.manual_seed(7)
    loader = LOADERS[kind]()
    for _ in range(3):
        learn(module, _left(loader))
    assert moved(net(), module) and distance(module, found) < 1e-6


def _left(loader: Any) -> Iterator[Any]:
    """Yield three batches, and leave the loop at the fourth."""
    for number, batch in enumerate(loader):
        if number == 3:
            return
        yield batch


def firsts(on: sg.Strategy, loader: DataLoader[Any]) -> list[list[int]]:
    """Return the first row and the number of rows of each share."""
    replica = sg.current_replica()
    return [[int(batch[0]), replica.share.examples] for batch in on.prepare(loader)]


@pytest.mark.parametrize("drop_last", [True, False])
def test_more_batches_than_one_message_holds(some: sg.Strategy, drop_last: bool) -> None:
    numbers: Any = torch.arange(1024 * 3 + 4)

    def loader() -> DataLoader[Any]:
        return DataLoader(
            numbers, batch_size=3, shuffle=True, drop_last=drop_last, generator=dice()
        )

    plain, count = loader(), some.num_replicas_in_sync
    expected = [batch.tolist() for batch in plain]
    for index, found in enumerate(some.run(firsts, some, loader())):
        starts = {1: [0], 2: [0, 2], 3: [0, 1, 2]}[count]
        sizes = {1: [3], 2: [2, 1], 3: [1, 1, 1]}[count]
        for batch, (first, rows) in zip(expected, found, strict=True):
            if len(batch) == 3:
                assert (first, rows) == (batch[starts[index]], sizes[index])
            else:
                assert (first, rows) == (batch[0], 1 if index == 0 else 0)


class Told(Sampler[int]):
    """A sampler of rows that the training loop sets."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(16):
            yield self.next

    def __len__(self) -> int:
        return 16


def follow(on: sg.Strategy) -> tuple[nn.Module, list[int]]:
    module, sampler, seen = net(), Told(), []
    loader = DataLoader(ROWS, batch_size=4, sampler=sampler)
    module, optimizer, batches = on.prepare(module, sgd(module.parameters()), loader)
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        seen.append(int((x[0] == X).all(1).nonzero()[0]))
        sampler.next = number + 1
    return module, seen


def test_a_sampler_that_the_loop_feeds(some: sg.Strategy) -> None:
    for _, seen in some.run(follow, some):
        assert seen == [0, 1, 2, 3]


# --- datasets and models that draw ---------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Draws a random number for each row, without using it."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return X[i] + 0 * torch.rand(()), Y[i]


class Sampling(nn.Module):
    """Draws random numbers in forward, which affect only the outputs of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.layer.load_state_dict(net().state_dict())

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(len(x), 4)
        return self.layer(x) + (0 * noise if self.training else 1e-9 * noise)


def test_a_dataset_that_draws_is_shuffled_as_one_that_does_not(some: sg.Strategy) -> None:
    module, model = net(), model_on(some)
    torch.manual_seed(7)
    model.fit(DataLoader(Noisy(), batch_size=8, shuffle=True), epochs=3, verbose=0)
    model.fit(DataLoader(Noisy(), batch_size=8, shuffle=True), epochs=2, verbose=0)
    torch.manual_seed(7)
    for epochs in (3, 2):
        draw()
        loader = DataLoader(ROWS, batch_size=8, shuffle=True)
        for _ in range(epochs):
            learn(module, loader)
    check(module, model)


def test_validation_draws_as_in_a_plain_loop(some: sg.Strategy) -> None:
    module, model = net(), model_on(some, Sampling())
    torch.manual_seed(7)
    held = DataLoader(Noisy(), batch_size=5, shuffle=True)
    model.fit(
        DataLoader(Noisy(), batch_size=8, shuffle=True), epochs=3, validation_data=held, verbose=0
    )
    torch.manual_seed(7)
    draw()
    loader = DataLoader(ROWS, batch_size=8, shuffle=True)
    other = DataLoader(ROWS, batch_size=5, shuffle=True)
    for _ in range(3):
        learn(module, loader)
        list(other)
    assert moved(net(), module) and distance(module, model.module.layer) < 1e-6  # type: ignore[arg-type]


class Look(sg.callbacks.Callback):
    """Calls `predict` in mid-training."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.predict(X, verbose=0)


def test_a_callback_that_predicts() -> None:
    module, model = net(), model_on(strategy(1), Sampling())
    torch.manual_seed(7)
    loader = DataLoader(ROWS, batch_size=8, shuffle=True)
    model.fit(loader, epochs=3, callbacks=[Look()], verbose=0)
    torch.manual_seed(7)
    draw()
    for _ in range(3):
        learn(module, loader)
    assert moved(net(), module) and distance(module, model.module.layer) < 1e-6  # type: ignore[arg-type]


def order_after(on: sg.Strategy, verb: str) -> tuple[Tensor, nn.Module]:
    model = model_on(on, Sampling())
    torch.manual_seed(7)
    for source in (X, DataLoader(Noisy(), batch_size=8)):
        if verb == "predict":
            model.predict(source, batch_size=8 if source is X else None, verbose=0)
        else:
            given = (X, Y) if source is X else (source,)
            model.evaluate(*given, verbose=0)
    where = torch.get_rng_state()
    model.fit(X, Y, batch_size=8, verbose=0)
    return where, model.module


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_what_comes_after_a_model_that_draws(some: sg.Strategy, verb: str) -> None:
    expected, alone = order_after(strategy(1), verb)
    found, module = order_after(some, verb)
    assert torch.equal(found, expected)
    assert distance(alone, module) < 1e-6


def test_a_model_that_draws_draws_anew(some: sg.Strategy) -> None:
    model = model_on(some, Sampling().double())
    torch.manual_seed(7)
    first, second = (model.predict(X.double(), batch_size=41, verbose=0) for _ in range(2))
    assert not (first == second).any()
    torch.manual_seed(7)
    assert torch.equal(first, model.predict(X.double(), batch_size=41, verbose=0))
    if some.num_replicas_in_sync == 1:
        torch.manual_seed(7)
        with torch.no_grad():
            assert torch.equal(first, model.module(X.double())), "not what torch draws"


def test_a_model_that_does_not_draw_leaves_the_dice(some: sg.Strategy) -> None:
    model = model_on(some)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    assert torch.equal(torch.get_rng_state(), before)


# --- workers' noise ------------------------------------------------------------------------------


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Any:
        return torch.rand(1, dtype=torch.float64)


def noise(on: sg.Strategy, loader: DataLoader[Any]) -> list[float]:
    shares = on.prepare(loader)
    return [float(v) for _ in range(2) for batch in shares for v in batch.flatten()]


def test_workers_of_replicas_draw_different_noise(some: sg.Strategy) -> None:
    if some.num_replicas_in_sync == 3:
        pytest.skip("as on two")
    loader = DataLoader(Noise(), batch_size=8, num_workers=1, generator=dice())
    model = sg.Model(nn.Identity(), some)
    assert len(set(model.predict(loader, verbose=0).flatten().tolist())) == 16
    seen = [value for part in some.run(noise, some, loader) for value in part]
    assert len(set(seen)) == 32


# --- how many rows a batch has -------------------------------------------------------------------


LENGTHS = torch.randint(1, 6, (21,), generator=dice()).tolist()
WORDS = [torch.randn(n, 6, generator=dice(i)) for i, n in enumerate(LENGTHS)]


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        return WORDS[i], Y[i]


class Named(UserDict[str, Any]):
    """A batch type like that of Hugging Face's tokenizers."""


def time_major(batch: Any) -> Any:
    texts, targets = zip(*batch, strict=True)
    padded = pad_sequence([F.pad(text, (0, 0, 0, 6 - len(text))) for text in texts])
    return padded, torch.stack(targets)


def packed(batch: Any) -> Any:
    texts, targets = zip(*batch, strict=True)
    return pack_sequence(texts, enforce_sorted=False), torch.stack(targets)


def named(batch: Any) -> Any:
    x, y = time_major(batch)
    return Named(x=x), y


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.cell, self.layer = nn.RNN(6, 5), nn.Linear(5, 4)

    def forward(self, x: Any) -> Tensor:
        assert isinstance(x, Tensor | PackedSequence | Named)
        out: Tensor = self.layer(self.cell(x["x"] if isinstance(x, Named) else x)[1][0])
        return out


COLLATE = {"time-major": time_major, "packed": packed, "named": named}


@pytest.mark.parametrize("kind", list(COLLATE))
def test_batches_whose_first_length_is_another(some: sg.Strategy, kind: str) -> None:
    loader = DataLoader(Texts(), batch_size=8, collate_fn=COLLATE[kind])
    model = model_on(some, Reader())
    alone, losses = Reader(), []
    optimizer = sgd(alone.parameters())
    for x, y in loader:
        loss = F.cross_entropy(alone(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) * len(y) / 21)
    with torch.no_grad():
        held = [float(F.cross_entropy(alone(x), y)) * len(y) / 21 for x, y in loader]
    history = model.fit(loader, validation_data=loader, verbose=0).history
    assert history["loss"] == [pytest.approx(sum(losses), abs=1e-6)]
    assert history["val_loss"] == [pytest.approx(sum(held), abs=1e-6)]
    assert history["examples_per_second"][0] > 0
    assert model.evaluate(loader, verbose=0)["loss"] == pytest.approx(sum(held), abs=1e-6)
    assert model.predict(loader, verbose=0).shape == (21, 4)
    inputs = DataLoader(Texts(), batch_size=8, collate_fn=lambda batch: COLLATE[kind](batch)[0])
    assert torch.equal(model.predict(inputs, verbose=0), model.predict(loader, verbose=0))


def test_a_dealt_batch_has_as_many_rows_as_indices() -> None:
    loader = DataLoader(Texts(), batch_size=8, collate_fn=time_major)
    work = Assignment(Ticket(0, 0, 0, 1), 1, {"indices": list(range(8)), "total": 8})
    portion = BatchScheduler(DatasetSource(loader, 3), 1).portion(work, 0)
    assert (portion.examples, portion.total) == (8, 8)


# --- shares in one's own loop --------------------------------------------------------------------


def count(on: sg.Strategy, collate: Any = None) -> list[int]:
    """Return this replica's counts of rows in training, and in a test loop within it."""
    dataset: Any = Texts() if collate else TensorDataset(X[:21], Y[:21])
    loader = DataLoader(dataset, batch_size=8, collate_fn=collate)
    module = Reader() if collate else net()
    module, _, batches = on.prepare(module, sgd(module.parameters()), loader)
    test = on.prepare(DataLoader(dataset, batch_size=5, collate_fn=collate))
    trained = tested = totals = 0
    for _ in batches:
        for _ in test:
            tested += sg.current_replica().share.examples
        share = sg.current_replica().share
        trained += share.examples
        totals += share.total
    return [trained, tested, totals]


@pytest.mark.parametrize("collate", [None, time_major])
def test_rows_of_a_prepared_loop(some: sg.Strategy, collate: Any) -> None:
    counts = torch.tensor(some.run(count, some, collate))
    assert counts[:, :2].sum(0).tolist() == [21, 63]
    assert counts[:, 2].tolist() == [21] * some.num_replicas_in_sync


def test_rows_of_a_prepared_loop_at_the_top_of_a_script() -> None:
    assert count(strategy(1)) == [21, 63, 21]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X[:21], Y[:21], strict=True))


def test_rows_of_loaders_that_only_one_device_takes() -> None:
    one = strategy(1)
    replica = one.replica()
    for loader in (
        DataLoader(Stream(), batch_size=8),
        DataLoader(TensorDataset(X[:21].view(7, 3, 6)), batch_size=None),
    ):
        found = []
        for _ in one.prepare(loader):
            found.append((replica.share.examples, replica.share.total))
        expected = [(8, 8), (8, 8), (5, 5)] if loader.batch_size else [(3, 3)] * 7
        assert found == expected


def look(on: sg.Strategy) -> list[Any]:
    loader = DataLoader(ROWS, batch_size=8, shuffle=True)
    batches = on.prepare(loader)
    within = sum(1 for _ in batches for _ in batches)
    return [len(batches), len(batches.dataset), batches.batch_size, len(batches.sampler), within]


def test_a_prepared_loader_looks_like_the_loader(some: sg.Strategy) -> None:
    for found in some.run(look, some):
        assert found == [6, 41, 8, 41, 36]
