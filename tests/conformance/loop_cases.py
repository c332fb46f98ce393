"""Custom loops: each written once, in plain torch, and run on one device as it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem import capabilities
from tests.conformance.net import Cases, Result, plain
from tests.conformance.placements import PLACEMENTS

case = Cases()
BATCH = 8


class OneDevice:
    """What a loop may call: here nothing is distributed, and the loop is plain torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.losses: list[float | None] = []

    def prepare(self, *given: Any, **options: Any) -> Any:
        return given if len(given) > 1 else given[0]

    def mean(self, loss: Tensor, count: Any = None) -> float:
        return float(loss.detach())

    def backward(self, loss: Tensor, count: Any, **options: Any) -> None:
        loss.backward(**options)

    def sum(self, value: Tensor) -> Tensor:
        return value

    def rows(self, batch: Any) -> Any:
        return batch

    def mine(self, rows: int) -> int:
        """How many rows of the batch in hand are this replica's own."""
        return rows

    def epochs(self, loader: Any, count: int) -> Iterable[int]:
        return range(count)

    def note(self, loss: Tensor, count: Any = None) -> None:
        self.losses.append(self.mean(loss, count))

    # --- what loops are made of

    def net(self, *layers: nn.Module, seed: int = 3) -> Any:
        """The layers, or an MLP with weights from this seed."""
        torch.manual_seed(seed)
        if not layers:
            layers = (nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        return nn.Sequential(*layers).to(self.dtype)

    def data(self, rows: int = 19, seed: int = 7) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 5, generator=dice, dtype=torch.float64)
        return x.to(self.dtype), torch.randint(0, 4, (rows,), generator=dice)

    def loader(self, *tensors: Tensor, batch: int = BATCH) -> Any:
        return DataLoader(TensorDataset(*(tensors or self.data())), batch_size=batch)


class Spread(OneDevice):
    """The same calls of a strategy."""

    def __init__(self, strategy: Any, name: str) -> None:
        super().__init__(PLACEMENTS[name].dtype)
        self.strategy, self.name = strategy, name
        self._says_means = not capabilities.refused(PLACEMENTS[name].kinds, {"mean of a loop"})

    def prepare(self, *given: Any, **options: Any) -> Any:
        return self.strategy.prepare(*given, **options)

    def mean(self, loss: Tensor, count: Any = None) -> float:
        return float(self.strategy.mean(loss, count=count))

    def backward(self, loss: Tensor, count: Any, **options: Any) -> None:
        self.strategy.backward(loss, count=count, **options)

    def sum(self, value: Tensor) -> Tensor:
        return self.strategy.reduce("sum", value)

    def rows(self, batch: Any) -> Any:
        return self.strategy.rows(batch)

    def mine(self, rows: int) -> int:
        return sg.current_replica().share.examples

    def epochs(self, loader: Any, count: int) -> Iterable[int]:
        """An elastic loop says what an epoch is."""
        own: Iterable[int] = loader.epochs(count) if hasattr(loader, "epochs") else range(count)
        return own

    def note(self, loss: Tensor, count: Any = None) -> None:
        self.losses.append(self.mean(loss, count) if self._says_means else None)


def play(name: str, on: OneDevice) -> Result:
    """Run the case; its tensors and losses."""
    torch.manual_seed(11)
    found = plain(case[name].play(on))
    return found | {f"loss {i}": each for i, each in enumerate(on.losses)}


def spread(name: str, strategy: Any, place: str) -> Result:
    """The same in a process of a strategy."""
    return play(name, Spread(strategy, place))


def sgd(model: nn.Module, rate: float = 0.2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=0.01)


def train(
    on: OneDevice,
    model: Any,
    optimizer: Any,
    loader: Any,
    loss_of: Callable[[Any, Any], Tensor] = F.cross_entropy,
    epochs: int = 2,
) -> None:
    """The loop that everybody writes."""
    for _ in on.epochs(loader, epochs):
        for x, y in loader:
            loss = loss_of(model(x), y)
            loss.backward()
            on.note(loss)
            optimizer.step()
            optimizer.zero_grad()


@case("batches that do not divide")
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    train(on, model, optimizer, loader)
    return model.state_dict()
