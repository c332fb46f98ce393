"""A backward pass for each row (task) of `strategy.rows`, and one for all of them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import distance, mlp, moved, strategy

pytestmark = pytest.mark.timeout(60)


def tasks(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """As many regressions of seven rows."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(count, 7, 6, generator=dice), torch.randn(count, 7, 4, generator=dice)


def meta_trained(on: sg.Strategy | None, count: int, given: str, way: str) -> nn.Module:
    """The mean over tasks, of which `strategy.rows` is given numbers or tensors."""
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if on is not None:
        model, optimizer, _ = on.prepare(model, optimizer)
    for seed in range(3):
        x, y = tasks(count, seed)
        numbers = list(range(count)) if given == "a list" else torch.arange(count)
        whole: Any = (x, y) if given == "tensors" else numbers
        share = whole if on is None else on.rows(whole)
        mine = list(zip(*share, strict=True)) if given == "tensors" else share

        def loss_of(task: Any, x: Tensor = x, y: Tensor = y) -> Tensor:
            a, b = task if given == "tensors" else (x[task], y[task])
            return F.mse_loss(model(a), b)

        if way == "one for each":
            for task in mine:
                loss_of(task).backward()
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / count
        else:
            loss = torch.stack([loss_of(task) for task in mine]).sum() / len(mine)
            if on is None:
                loss.backward()
            else:
                on.backward(loss, count=len(mine))
        optimizer.step()
        optimizer.zero_grad()
    return model


CASES = [
    pytest.param(replicas, count, given, id=f"{count} tasks in {given} on {replicas}")
    for replicas, count, given in [
        (2, 2, "a list"),
        (2, 2, "tensors"),
        (2, 3, "a list"),
        (2, 4, "a tensor of numbers"),
        (2, 5, "tensors"),
        (2, 5, "a tensor of numbers"),
        (3, 2, "tensors"),
        (3, 5, "a list"),
        (3, 7, "tensors"),
    ]
]


@pytest.mark.parametrize(("replicas", "count", "given"), CASES)
def test_one_pass_for_each_task_is_refused_with_the_call_that_is_exact(
    replicas: int, count: int, given: str
) -> None:
    expected = meta_trained(None, count, given, "one for each")
    assert moved(expected, mlp())
    said = r"strategy\.backward\(sum_of_losses / len\(mine\), count=len\(mine\)\)"
    with strategy(replicas) as on:
        with pytest.raises(sg.NotDistributable, match=said):
            on.run(meta_trained, on, count, given, "one for each")
        for model in on.run(meta_trained, on, count, given, "one for all"):
            assert distance(model, expected) < 1e-6


def passes_over_all_rows(on: sg.Strategy | None, rows: int, changed: bool) -> nn.Module:
    """As many passes as a share has rows: those of two losses, or of steps apart."""
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if on is not None:
        model, optimizer, _ = on.prepare(model, optimizer)
    x, y = tasks(rows, 0)
    x, y = x[:, 0], y[:, 0]
    if on is not None:
        x, y = on.rows((x, y))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=not changed)
        F.mse_loss(model(x * 2 if changed else x), y).backward()
        if not changed:
            F.l1_loss(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("rows", "changed"), [(3, False), (4, False), (4, True), (6, True)])
def test_passes_over_all_rows_add_up(rows: int, changed: bool) -> None:
    expected = passes_over_all_rows(None, rows, changed)
    with strategy(2) as on:
        for model in on.run(passes_over_all_rows, on, rows, changed):
            assert distance(model, expected) < 1e-6


def test_a_list_of_rows_is_a_list() -> None:
    def own(on: sg.Strategy) -> Any:
        mine = on.rows({"texts": ["a", "b", "c", "d"], "sizes": [1, 2, 3, 4]})
        texts = mine["texts"]
        same = [
            copy.deepcopy(texts),
            pickle.loads(pickle.dumps(texts)),
            json.loads(json.dumps(texts)),
        ]
        assert all(type(each) is list and each == texts for each in same)
        return [text + str(size) for text, size in zip(texts, mine["sizes"], strict=True)]

    with strategy(2) as on:
        assert on.run(own, on) == [["a1", "b2"], ["c3", "d4"]]


def test_a_mean_over_tasks_is_told_of_tasks() -> None:
    """Five tasks on two replicas: three losses here, two there."""
    on = strategy(2)

    def train() -> None:
        model = mlp()
        model, _, _ = on.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = tasks(5, 0)
        mine = on.rows(list(range(5)))
        losses = [F.mse_loss(model(x[task]), y[task]) for task in mine]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]

    words = r"tokens or tasks.*mean over tasks: strategy\.backward\(loss, count=tasks\)"
    with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match=words):
        on.run(train)


def in_parts(
    on: sg.Strategy | None, parts: Callable[[Tensor], Sequence[Tensor]], by: str
) -> nn.Module:
    """A backward pass for each part of a loader's batch."""
    dice = torch.Generator().manual_seed(4)
    x, y = torch.randn(32, 6, generator=dice), torch.randint(0, 4, (32,), generator=dice)
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=16)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for a, b in loader:
        for c, d in zip(parts(a), parts(b), strict=True):
            weight = {"number": len(parts(x[:16])), "share": len(a) / len(c)}[by]
            (F.cross_entropy(model(c), d) / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_passes_over_parts_of_a_batch_are_exact_or_refused(two: sg.MirroredStrategy) -> None:
    two_rows = lambda rows: rows.split(2)  # noqa: E731
    four_parts = lambda rows: rows.chunk(4)  # noqa: E731
    for parts, by in ((two_rows, "share"), (four_parts, "share"), (four_parts, "number")):
        expected = in_parts(None, parts, by)
        assert moved(expected, mlp())
        for trained in two.run(in_parts, two, parts, by):
            assert distance(trained, expected) < 1e-6
    with pytest.raises(sg.NotDistributable, match=r"by that part \(loss \* len\(part\) / len\(x\)"):
        two.run(in_parts, two, two_rows, "number")


def adversarial(on: sg.Strategy | None) -> nn.Module:
    """Two passes of a discriminator, over rows that the loop has changed."""
    torch.manual_seed(1)
    model = nn.Linear(6, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if on is not None:
        model, optimizer, _ = on.prepare(model, optimizer)
    real, false = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(2))
    for i in (0, 4):
        rows = real[i : i + 4], false[i : i + 4]
        for z, label in zip(rows if on is None else on.rows(rows), (1.0, 0.0), strict=True):
            out = model(z / 2)
            F.binary_cross_entropy_with_logits(out, torch.full_like(out, label)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_as_many_passes_as_rows_over_changed_rows_are_right(two: sg.MirroredStrategy) -> None:
    expected = adversarial(None)
    for trained in two.run(adversarial, two):
        assert distance(trained, expected) < 1e-6
