"""A count of a share that hides in a custom loop's loss: one device's result, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import data, distance, mlp, moved

pytestmark = pytest.mark.timeout(60)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
CLASS_WEIGHTS = torch.tensor([0.3, 0.7, 1.1, 2.3])


def train(on: sg.Strategy | None, loss: Loss, batch: int, **options: Any) -> nn.Module:
    """Train on 21 rows, of which every third does not count; the first two batches divide by 2."""
    x, y = data(21)
    model, counts = mlp(), torch.arange(21) % 3 > 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y, counts), batch_size=batch)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader, **options)
    for a, b, c in loader:
        loss(model(a), b, c).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_evenly(on: sg.Strategy | None, losses: Callable[[int], list[Loss]]) -> nn.Module:
    """Train on 32 rows in batches of 8, each with a pass for every loss of its number. All rows of
    the first batch count, and as many on each replica."""
    x, y = data(32)
    model, counts = mlp(), torch.arange(32) % 2 > 0
    counts[:8], counts[8:12] = True, True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y, counts), batch_size=8)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for number, (a, b, c) in enumerate(loader):
        for loss in losses(number):
            loss(model(a), b, c).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def rows_of(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def guarded(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    rare = c & (y == 1)
    return rows_of(out, y)[rare].mean() if rare.any() else out.sum() * 0


def clamped(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    rare = c & (y == 1)
    return (rows_of(out, y) * rare).sum() / max(rare.sum(), 1)


HIDDEN: dict[str, Loss] = {
    "times the rows": lambda o, y, c: F.cross_entropy(o, y) * len(o) / 8,
    "times a size": lambda o, y, c: F.cross_entropy(o, y) * o.size(0) * 0.125,
    "times a part": lambda o, y, c: F.cross_entropy(o, y) * (len(o) / 21),
    "times a tensor": lambda o, y, c: F.cross_entropy(o, y) * torch.tensor(float(len(o))) / 8,
    "times counted values": lambda o, y, c: rows_of(o, y)[c].mean() * c.sum().item() / 8,
    "times ignored targets": lambda o, y, c: (
        F.cross_entropy(o, y.masked_fill(~c, -100)) * c.sum().item() / 8
    ),
    "divided by the rows": lambda o, y, c: F.cross_entropy(o, y) / len(o),
    "a guard": guarded,
    "a clamped count": clamped,
    "by a constant": lambda o, y, c: rows_of(o, y).sum() / torch.tensor(64.0),
    "a masked sum by a constant": lambda o, y, c: (rows_of(o, y) * c).sum() / torch.tensor(64.0),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_count_of_the_share_is_refused(name: str, two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.NotDistributable, match=r"strategy\.backward\(loss, count=n\)"):
        two.run(train, two, HIDDEN[name], 8)


def plain(o: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return F.cross_entropy(o, y)


def always(loss: Loss) -> Callable[[int], list[Loss]]:
    return lambda number: [loss]


HIDDEN_LATER: dict[str, Callable[[int], list[Loss]]] = {
    "a constant in a second loss": lambda _: [plain, HIDDEN["by a constant"]],
    "from the third batch on": lambda i: [HIDDEN["times a tensor"] if i > 1 else plain],
    "a mask that was full": always(lambda o, y, c: F.cross_entropy(o, y) * c.float().mean()),
    "a constant that equals the rows": always(
        lambda o, y, c: rows_of(o, y).sum() / torch.tensor(4.0)
    ),
    "a count that all have": always(lambda o, y, c: plain(o, y, c) * (y[:2] > -1).sum() / 8),
    "one more than the count": always(
        lambda o, y, c: (rows_of(o, y) * (y != 1)).sum() / ((y != 1).sum() + 1)
    ),
    "at least one": always(
        lambda o, y, c: (rows_of(o, y) * (y == 1)).sum() / max(1, int((y == 1).sum()))
    ),
    "a mean divided by the rows": always(lambda o, y, c: F.cross_entropy(o, y) / len(o)),
}


@pytest.mark.parametrize("name", HIDDEN_LATER)
def test_a_count_is_refused_in_every_loss_of_every_batch(
    name: str, two: sg.MirroredStrategy
) -> None:
    with pytest.raises(sg.NotDistributable, match=r"strategy\.backward\(loss, count=n\)"):
        two.run(train_evenly, two, HIDDEN_LATER[name])


def accumulated(on: sg.Strategy | None) -> nn.Module:
    """As many passes as each share has rows, before each step."""
    x, y = data(64)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for number, (a, b) in enumerate(loader, 1):
        (F.cross_entropy(model(a), b) / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return model


def test_a_divisor_may_be_how_often_gradients_are_accumulated(two: sg.MirroredStrategy) -> None:
    expected = accumulated(None)
    assert moved(expected, mlp())
    for trained in two.run(accumulated, two):
        assert distance(trained, expected) < 1e-6


EVEN: dict[str, Loss] = {
    "a weight of one term": lambda o, y, c: F.cross_entropy(o, y) + 4 * o.abs().mean(),
    "as many as values": lambda o, y, c: 16 * o.abs().mean(),
    "a full mask": lambda o, y, c: (rows_of(o, y) * (y > -1)).sum() / (y > -1).float().sum(),
    "targets that are all there": lambda o, y, c: (
        F.cross_entropy(o, y, reduction="sum") / (y != -100).sum()
    ),
    "what is picked": lambda o, y, c: rows_of(o, y)[y > -1].sum() / (y > -1).float().sum(),
    "two masks": lambda o, y, c: (rows_of(o, y) * c * (y < 3)).sum() / (c * (y < 3)).sum(),
    "no row on one replica": lambda o, y, c: (
        (rows_of(o, y) * (y == 3)).sum() / ((y == 3).sum() + 1e-8)
    ),
    "a scale": lambda o, y, c: F.cross_entropy(o, y) * torch.tensor(64.0) / 64,
}


@pytest.mark.parametrize("name", EVEN)
def test_weights_and_counts_of_even_shares_are_exact(name: str, two: sg.MirroredStrategy) -> None:
    expected = train_evenly(None, always(EVEN[name]))
    assert moved(expected, mlp())
    for trained in two.run(train_evenly, two, always(EVEN[name])):
        assert distance(trained, expected) < 1e-6


EXACT: dict[str, Loss] = {
    "smoothed, with class weights": lambda o, y, c: F.cross_entropy(
        o, y.masked_fill(~c, -100), weight=CLASS_WEIGHTS, label_smoothing=0.1
    ),
    "by what is picked": lambda o, y, c: rows_of(o, y)[c].sum() / c.sum(),
    "by a mask": lambda o, y, c: (rows_of(o, y) * c).sum() / c.sum().clamp(min=1),
    "filled": lambda o, y, c: rows_of(o, y).masked_fill(~c, 0.0).sum() / c.sum(),
    "chosen": lambda o, y, c: torch.where(c, rows_of(o, y), 0.0).sum() / c.sum(),
    "by wide weights": lambda o, y, c: (o.pow(2) * c[:, None]).sum() / (c.sum() * 4),
    "by the targets that count": lambda o, y, c: (
        F.cross_entropy(o, y.masked_fill(~c, -100), reduction="sum") / c.sum()
    ),
    "with a weight that equals one share's rows": lambda o, y, c: 2 * F.cross_entropy(o, y),
    "with weights of terms": lambda o, y, c: 3 * F.cross_entropy(o, y) + 0.5 * o.abs().mean() / 2,
}


@pytest.mark.parametrize("name", EXACT)
def test_a_count_of_what_is_added_up_is_read(name: str, three: sg.MirroredStrategy) -> None:
    expected = train(None, EXACT[name], 8)
    assert moved(expected, mlp())
    for trained in three.run(train, three, EXACT[name], 8):
        assert distance(trained, expected) < 1e-6


def test_equal_counts_of_what_is_added_up_are_no_constant(two: sg.MirroredStrategy) -> None:
    """Both shares of the first batch count as many."""
    every = lambda o, y, c: (rows_of(o, y) * (c | True)).sum() / (c | True).sum()  # noqa: E731
    expected = train(None, every, 8)
    for trained in two.run(train, two, every, 8):
        assert distance(trained, expected) < 1e-6


def test_a_mean_times_the_rows_is_a_sum_for_who_says_so(three: sg.MirroredStrategy) -> None:
    expected = train(None, HIDDEN["times the rows"], 8)
    said = lambda: train(three, HIDDEN["times the rows"], 8, loss_reduction="sum")  # noqa: E731
    for trained in three.run(said):
        assert distance(trained, expected) < 1e-6


def test_a_number_that_all_replicas_change_alike_is_no_count(two: sg.MirroredStrategy) -> None:
    def annealed() -> Loss:
        step = iter(range(1, 9))
        return lambda o, y, c: F.cross_entropy(o, y) + next(step) * 0.1 * o.pow(2).mean()

    expected = train(None, annealed(), 8)
    for trained in two.run(lambda: train(two, annealed(), 8)):
        assert distance(trained, expected) < 1e-6


def test_a_sum_by_a_number_is_offered_what_says_that_it_is_a_sum(two: sg.MirroredStrategy) -> None:
    by_eight: Loss = lambda o, y, c: F.cross_entropy(o, y, reduction="sum") / 8  # noqa: E731
    words = r'a sum over rows divided by 8(.|\n)*prepare\(\.\.\., loss_reduction="sum"\)'
    with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match=words):
        two.run(train, two, by_eight, 8)
