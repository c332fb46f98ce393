"""One's own loop over a collate function that pads: said where shares are unequally wide."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import stratagem as sg

pytestmark = pytest.mark.timeout(60)

WORDS = "pads to the longest of a share"
DICE = torch.Generator().manual_seed(0)
SENTENCES = [(torch.randn(1 + i % 7, 5, generator=DICE), torch.tensor(i % 2)) for i in range(21)]


def padded(items: Any) -> Any:
    x, y = zip(*items, strict=True)
    return pad_sequence(list(x), batch_first=True), torch.stack(y)


def fixed(items: Any) -> Any:
    x, y = padded(items)
    return F.pad(x, (0, 0, 0, 7 - x.shape[1])), y


def loader(collate: Any) -> DataLoader[Any]:
    return DataLoader(SENTENCES, batch_size=6, collate_fn=collate)  # type: ignore[arg-type]


def trained(strategy: sg.Strategy | None, collate: Any, *, alone: bool) -> Tensor:
    """Two epochs of the mean over all positions; `alone`: the loader is prepared by itself."""
    torch.manual_seed(3)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches: Any = loader(collate)
    if strategy is not None and alone:
        strategy.prepare(model, optimizer)
        batches = strategy.prepare(batches)
    elif strategy is not None:
        _, _, batches = strategy.prepare(model, optimizer, batches)
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x.mean(1)), y).backward()
            optimizer.step()
    assert len(batches) == 4
    return model.weight.detach()


@pytest.mark.parametrize("alone", [False, True])
def test_unequal_shares_are_named_once(
    two: sg.Strategy, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    with caplog.at_level(logging.WARNING, "stratagem"):
        found = two.run(lambda: trained(two, padded, alone=alone))
    (told,) = [r.getMessage() for r in caplog.records if WORDS in r.getMessage()]
    assert "(3, 3, 5) of replica 0's share of a batch, and of (3, 6, 5) of replica 1's" in told
    assert float((found[0] - trained(None, padded, alone=alone)).abs().max()) > 1e-4  # it matters


@pytest.mark.parametrize("alone", [False, True])
def test_of_the_remedy_nothing_is_said(
    two: sg.Strategy, three: sg.Strategy, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    plain = trained(None, fixed, alone=alone)
    with caplog.at_level(logging.WARNING, "stratagem"):
        for strategy in (two, three):
            for found in strategy.run(trained_with_fixed, strategy, alone):
                torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)
    assert not [r for r in caplog.records if WORDS in r.getMessage()]


def trained_with_fixed(strategy: sg.Strategy, alone: bool) -> Tensor:
    return trained(strategy, fixed, alone=alone)
