"""A module's own buffers on several replicas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import data

pytestmark = pytest.mark.timeout(60)


class Counting(nn.Module):
    """Counts rows, keeps a mean that moves, and holds what never changes."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("mask", torch.eye(3, dtype=torch.bool))
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.mean.lerp_(x[:, 0].mean(), 0.5)
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


def fitted(on: sg.Strategy, module: nn.Module) -> None:
    """Two epochs of 5 rows each: replica 0 gets 3 of them, replica 1 gets 2."""
    x, y = data(5)
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0])
    model = sg.Model(module, on)
    model.compile(optimizer="sgd", loss="cross_entropy")
    model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)


def test_buffers_of_ones_own(two: sg.Strategy) -> None:
    """Fractions: the mean over replicas, however many rows each had. Counts: replica 0's."""
    module = Counting()
    fitted(two, module)
    assert module.seen == 6
    first = (0.5 * 1 + 0.5 * 3) / 2
    assert module.mean == pytest.approx(((first + 1) / 2 + (first + 3) / 2) / 2)


def test_batch_norm_counts_the_chiefs_batches(two: sg.Strategy) -> None:
    """A last batch of one row: replica 1 has none, and counts a batch less."""
    module = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 4))
    model = sg.Model(module, two)
    model.compile(optimizer="sgd", loss="cross_entropy")
    x, y = data(5)
    model.fit(x[:, None], y, batch_size=4, verbose=0)
    assert module[1].num_batches_tracked == 2


def test_counts_in_a_loop_of_ones_own(two: sg.Strategy) -> None:
    x, y = data(5)

    def train() -> int:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x, y), batch_size=5)
        model, optimizer, loader = two.prepare(model, optimizer, loader)
        for _ in range(2):
            for rows, targets in loader:
                F.cross_entropy(model(rows), targets).backward()
        return int(model.seen)

    assert two.run(train) == [6, 4]
