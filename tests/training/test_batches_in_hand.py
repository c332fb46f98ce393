"""Loops that have several batches in hand: each loss weighs by the share of its own batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import data, distance, mlp, moved

pytestmark = pytest.mark.timeout(60)
Losses = Iterator[torch.Tensor]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def in_windows(model: nn.Module, loader: Any) -> Losses:
    """As Hugging Face's Trainer does, which counts the tokens of several batches first."""
    batches = iter(loader)
    while window := [batch for _ in range(3) if (batch := next(batches, None)) is not None]:
        for batch in window:
            yield loss_of(model, batch)


def in_a_list(model: nn.Module, loader: Any) -> Losses:
    for batch in reversed(list(loader)):
        yield loss_of(model, batch)


def one_ahead(model: nn.Module, loader: Any) -> Losses:
    batches = iter(loader)
    ahead = next(batches)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        yield loss_of(model, batch)


def forward_ahead(model: nn.Module, loader: Any) -> Losses:
    """The forward pass of the next batch comes before the backward pass of the one before."""
    batches = iter(loader)
    ahead = loss_of(model, next(batches))
    for batch in batches:
        loss, ahead = ahead, loss_of(model, batch)
        yield loss
    yield ahead


def all_forward(model: nn.Module, loader: Any) -> Losses:
    yield from [loss_of(model, batch) for batch in list(loader)]


def with_a_penalty(model: nn.Module, loader: Any) -> Losses:
    for batch in list(loader):
        yield loss_of(model, batch) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def changed_one_by_one(model: nn.Module, loader: Any) -> Losses:
    for x, y in loader:
        yield F.cross_entropy(model(x * 2), y)


def list_of_one(model: nn.Module, loader: Any) -> Losses:
    """The last window has one batch only, and the loader has ended when it is trained on."""
    batches = iter(loader)
    while window := [batch for _ in range(2) if (batch := next(batches, None)) is not None]:
        for x, y in window:
            yield F.cross_entropy(model(x), y)


def a_kept_one_again(model: nn.Module, loader: Any) -> Losses:
    kept = []
    for batch in loader:
        kept.append(batch)
        yield loss_of(model, batch)
        yield loss_of(model, kept[0])


def the_one_before_again(model: nn.Module, loader: Any) -> Losses:
    before = None
    for batch in loader:
        yield loss_of(model, batch)
        if before is not None:
            yield 0.5 * loss_of(model, before)
        before = batch


def with_targets_kept(model: nn.Module, loader: Any) -> Losses:
    """Nothing is trained again, and an encoder's method is no forward pass."""
    targets = []
    for x, y in loader:
        targets.append(y)
        yield F.cross_entropy(model[2](model[1](model[0](x * 2))), y)


def views_in_a_list(model: nn.Module, loader: Any) -> Losses:
    for x, y in list(loader):
        yield F.cross_entropy(model(x.view(-1, 3, 2).flatten(1)), y)


HOW: list[Callable[[nn.Module, Any], Losses]] = [
    in_windows,
    in_a_list,
    one_ahead,
    forward_ahead,
    all_forward,
    with_a_penalty,
    changed_one_by_one,
    list_of_one,
    a_kept_one_again,
    the_one_before_again,
    with_targets_kept,
    views_in_a_list,
]


def train(
    on: sg.Strategy | None,
    how: Callable[[nn.Module, Any], Losses],
    reduction: str | None = None,
    rows: int = 9,
) -> nn.Module:
    torch.manual_seed(0)
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(TensorDataset(*data(rows)), batch_size=4)  # 4, 4, 1
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader, loss_reduction=reduction)
    for _ in range(3):
        for loss in how(model, loader):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def of_tokens(on: sg.Strategy | None, rows: int, batch: int, window: int) -> nn.Module:
    """Losses divided by the tokens of a window that were gathered."""
    torch.manual_seed(0)
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = data(rows)
    y[1::3] = -100
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=batch)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader, loss_reduction="sum")
    batches = iter(loader)
    while several := [each for _ in range(window) if (each := next(batches, None)) is not None]:
        targets = [y if on is None else on.gather(y) for _, y in several]
        tokens = sum(int((each != -100).sum()) for each in targets)
        for x, y in several:
            (F.cross_entropy(model(x), y, reduction="sum") / max(tokens, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (5, 2), (9, 4), (8, 4)])
def test_windows_are_divided_by_gathered_tokens(
    rows: int, batch: int, two: sg.MirroredStrategy, three: sg.MirroredStrategy
) -> None:
    for window in (1, 2, 3, 4):
        expected = of_tokens(None, rows, batch, window)
        assert moved(expected, mlp())
        for on in (two, three):
            for trained in on.run(of_tokens, on, rows, batch, window):
                assert distance(trained, expected) < 1e-6


@pytest.mark.parametrize("how", HOW, ids=lambda each: each.__name__)
def test_each_batch_weighs_by_its_own_share(
    how: Callable[[nn.Module, Any], Losses], two: sg.MirroredStrategy, three: sg.MirroredStrategy
) -> None:
    expected = train(None, how)
    assert moved(expected, mlp())
    for on in (two, three):
        for trained in on.run(train, on, how):
            assert distance(trained, expected) < 1e-6


def zipped(on: sg.Strategy | None, *, added: bool) -> nn.Module:
    """A step on batches of two loaders, of which one has other batches than the other."""
    torch.manual_seed(0)
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    first: Any = DataLoader(TensorDataset(*data(9)), batch_size=4)
    second: Any = DataLoader(TensorDataset(*data(13, seed=1)), batch_size=5)
    if on is not None:
        model, optimizer, first = on.prepare(model, optimizer, first)
        second = on.prepare(second)
    for _ in range(3):
        for a, b in zip(first, second, strict=True):
            losses = [loss_of(model, a), 0.5 * loss_of(model, b)]
            for loss in [sum(losses)] if added else losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_two_loaders_at_once(three: sg.MirroredStrategy) -> None:
    expected = zipped(None, added=False)
    assert moved(expected, mlp())
    for trained in three.run(lambda: zipped(three, added=False)):
        assert distance(trained, expected) < 1e-6
    with pytest.raises(sg.NotDistributable, match=r"call backward\(\) for each batch"):
        three.run(lambda: zipped(three, added=True))


def added_up(model: nn.Module, loader: Any) -> Losses:
    total = torch.zeros(())
    for batch in loader:
        total = total + loss_of(model, batch)
    yield total


def changed_in_a_list(model: nn.Module, loader: Any) -> Losses:
    for x, y in list(loader):
        yield F.cross_entropy(model(x * 2), y)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (added_up, r"call backward\(\) for each batch"),
        (changed_in_a_list, "the very tensors that the loader yields"),
    ],
)
def test_where_it_cannot_be_known_shares_of_several_sizes_are_refused(
    how: Callable[[nn.Module, Any], Losses], told: str, two: sg.MirroredStrategy
) -> None:
    with pytest.raises(sg.NotDistributable, match=told):
        two.run(train, two, how)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_the_loss_is_said_to_be_changes_nothing(
    reduction: str, two: sg.MirroredStrategy
) -> None:
    def summed(model: nn.Module, loader: Any) -> Losses:
        for x, y in list(loader):
            yield F.cross_entropy(model(x), y, reduction=reduction)

    for trained in two.run(train, two, summed, reduction):
        assert distance(trained, train(None, summed)) < 1e-6


@pytest.mark.parametrize("rows", [2, 9, 10])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_that_waits_at_the_end_of_its_loader(
    rows: int, reduction: str, two: sg.MirroredStrategy, three: sg.MirroredStrategy
) -> None:
    """Of 2 rows of 3 replicas, or of one, a replica has none, and borrows one."""

    def windows(model: nn.Module, loader: Any) -> Losses:
        batches = iter(loader)
        while window := list(islice(batches, 2)):
            for x, y in window:
                yield F.cross_entropy(model(x), y, reduction=reduction)

    expected = train(None, windows, rows=rows)
    assert moved(expected, mlp())
    for on in (two, three):
        for trained in on.run(train, on, windows, reduction, rows):
            assert distance(trained, expected) < 1e-6


def evaluated(on: sg.Strategy | None) -> tuple[nn.Module, list[float]]:
    """Batches that a loop keeps, or evaluates, are none that wait for their training."""
    torch.manual_seed(0)
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    train: Any = DataLoader(TensorDataset(*data(9)), batch_size=4)
    test: Any = DataLoader(TensorDataset(*data(13, seed=1)), batch_size=5)
    if on is not None:
        model, optimizer, train = on.prepare(model, optimizer, train)
        test = on.prepare(test)
    kept, losses = [next(iter(test))], []
    pictures = iter(test)
    kept.append(next(pictures))
    for _ in range(2):
        for x, y in train:
            loss = F.cross_entropy(model(x.clone()), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(next(pictures, kept[0])[0].clone())
            losses.append(float(loss.detach()) if on is None else on.mean(loss))
        with torch.no_grad():
            for a, b in test:
                loss = F.cross_entropy(model(a.clone()), b)
                losses.append(float(loss.detach()) if on is None else on.mean(loss))
    return model, losses


def test_batches_that_are_kept_or_evaluated(three: sg.MirroredStrategy) -> None:
    expected, losses = evaluated(None)
    assert moved(expected, mlp())
    for trained, means in three.run(evaluated, three):
        assert distance(trained, expected) < 1e-6
        assert means == pytest.approx(losses, abs=1e-6)


def saved(on: sg.Strategy, path: Any) -> None:
    model = mlp()
    model, _, loader = on.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        DataLoader(TensorDataset(*data(9)), batch_size=4),
    )
    batches = list(loader)
    assert not torch.equal(model(batches[0][0]), model(batches[1][0]))
    if on.is_chief:
        torch.save([model, batches[0]], path)


def test_a_model_and_a_batch_are_saved_as_they_are(two: sg.MirroredStrategy, tmp_path: Any) -> None:
    two.run(saved, two, tmp_path / "model.pt")
    code = (
        "import sys, torch; model, (x, y) = torch.load(sys.argv[1], weights_only=False)\n"
        "assert model(x).shape == (2, 4) and 'stratagem' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True)


def gathered_late(where: sg.Strategy) -> list[list[float]]:
    x = torch.arange(9.0)  # batches of 4, 4 and 1: the last one has no row for the second replica
    loader = where.prepare(DataLoader(TensorDataset(x), batch_size=4))
    return [where.gather(rows).tolist() for (rows,) in reversed(list(loader))]


@pytest.mark.parametrize("replicas", [2, 3])
def test_rows_of_batches_in_hand_are_gathered_without_borrowed_ones(replicas: int) -> None:
    with sg.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as where:
        for found in where.run(gathered_late, where):
            assert found == [[8.0], [4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]
