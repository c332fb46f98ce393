"""Collate functions that pad to the longest of a share: said where shares are unequally wide."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from tests.support import strategy

pytestmark = pytest.mark.timeout(60)

WORDS = "pads to the longest of a share"


class Sentences(Dataset[Any]):
    """Of 1 to 7 words, or all alike."""

    def __init__(self, *, even: bool = False) -> None:
        dice = torch.Generator().manual_seed(0)
        lengths = [5 if even else 1 + i % 7 for i in range(21)]
        self.items = [torch.randn(n, 5, generator=dice) for n in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index], torch.tensor(index % 2)


def padded(items: Any) -> Any:
    x, y = zip(*items, strict=True)
    return pad_sequence(list(x), batch_first=True), torch.stack(y)


def padded_time_first(items: Any) -> Any:
    x, y = zip(*items, strict=True)
    return pad_sequence(list(x)), torch.stack(y)


def fixed(items: Any) -> Any:
    x, y = padded(items)
    return nn.functional.pad(x, (0, 0, 0, 7 - x.shape[1])), y


def in_one(items: Any) -> Any:
    """Words one after another, and to which sentence each belongs: nothing is padded."""
    x, y = zip(*items, strict=True)
    owner = torch.repeat_interleave(torch.arange(len(x)), torch.tensor([len(each) for each in x]))
    return {"x": torch.cat(x), "owner": owner}, torch.stack(y)


class Mean(nn.Module):
    """Over all positions, padded ones too."""

    def __init__(self, time: int = 1) -> None:
        super().__init__()
        self.time = time
        torch.manual_seed(3)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean(self.time))


class OfOne(Mean):
    def forward(self, x: Tensor, owner: Tensor) -> Tensor:  # type: ignore[override]
        sums = torch.zeros(int(owner.max()) + 1, 5).index_add(0, owner, x)
        return self.out(sums)


@pytest.fixture(scope="module")
def two() -> Iterator[sg.Strategy]:
    with strategy(2) as made:
        yield made


def model_on(where: sg.Strategy, module: nn.Module) -> sg.Model:
    model = sg.Model(module, where)
    model.compile(optimizer=lambda p: torch.optim.SGD(p, lr=0.5), loss="cross_entropy")
    return model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if WORDS in r.getMessage()]


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize("time", [1, 0])
def test_unequal_shares_are_named_once(
    two: sg.Strategy, caplog: pytest.LogCaptureFixture, verb: str, time: int
) -> None:
    collate = padded if time else padded_time_first
    loader = DataLoader(Sentences(), batch_size=6, collate_fn=collate)
    with caplog.at_level(logging.WARNING, "stratagem"):
        for _ in range(2):
            getattr(model_on(two, Mean(time)), verb)(loader, verbose=0)
    (told,) = warnings(caplog)
    shapes = "(3, 3, 5) of replica 0's share of a batch, and of (3, 6, 5)"
    assert (shapes if time else "(6, 3, 5)") in told and "to a fixed length" in told
    # it does matter: one device pads the first rows further
    alone = model_on(strategy(1), Mean(time)).evaluate(loader, verbose=0)["loss"]
    ours = model_on(two, Mean(time)).evaluate(loader, verbose=0)["loss"]
    assert abs(alone - ours) > 1e-4


@pytest.mark.parametrize("kind", ["fixed", "even", "in one", "one device"])
def test_nothing_is_said_of(
    two: sg.Strategy, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """And the remedy gives what one device gives."""
    collate: Any = {"fixed": fixed, "in one": in_one}.get(kind, padded)
    loader = DataLoader(Sentences(even=kind == "even"), batch_size=6, collate_fn=collate)
    module = OfOne() if kind == "in one" else Mean()
    with caplog.at_level(logging.WARNING, "stratagem"):
        model = model_on(strategy(1) if kind == "one device" else two, module)
        found = model.evaluate(loader, verbose=0)["loss"]
        model.fit(loader, verbose=0)
    assert warnings(caplog) == []
    plain = OfOne() if kind == "in one" else Mean()
    total = 0.0
    for x, y in loader:
        output = plain(**x) if isinstance(x, dict) else plain(x)
        total += nn.functional.cross_entropy(output, y).item() * len(y)
    assert abs(found - total / 21) < 1e-5
