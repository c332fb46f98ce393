"""Models that torch's own pipelines refuse or get wrong, and that other files do not test.

The whole table, with the tests of each row, is in docs/model-parallel.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from tests.strategies.test_pipeline import fitted, sgd
from tests.support import by_hand, cpus, distance, moved

pytestmark = pytest.mark.timeout(120)


class Tells(nn.Module):
    """Returns a dict of several types; its `if` prevents tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.inner(x)
        if float(h.detach().sum()) > 1e9:
            h = -h
        return {"h": (h, h.detach().bfloat16()), "above": h > 0, "most": h.argmax(1), "scale": 0.5}


class Hears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.by_class = nn.Linear(8, 4), nn.Embedding(8, 4)

    def forward(self, told: dict[str, Any]) -> Tensor:
        h, rounded = told["h"]
        if float(h.detach().sum()) > 1e9:
            h = -h
        h = torch.where(told["above"], h, told["scale"] * h) + 0 * rounded.to(h)
        found: Tensor = self.inner(h) + self.by_class(told["most"])
        return found


class Packed(nn.Module):
    """Only unpadded words go through the layers, so the size at the cut depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, counts = self.words(x), x != 0
        packed = self.inner(h[counts])
        found: Tensor = self.head(h.masked_scatter(counts.unsqueeze(-1), packed).sum(1))
        return found


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(9, 8)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(8, 2, 16, 0.0)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.words(x)).transpose(0, 1)  # a view that is not contiguous
        found: Tensor = self.head(self.layers[1](h).mean(0))
        return found


@pytest.fixture(scope="module", params=[None, "ring"])
def pair(request: pytest.FixtureRequest) -> Iterator[sg.PipelineStrategy]:
    with sg.PipelineStrategy(cpus(2), 4, cross_device_ops=request.param) as made:
        yield made


def test_what_crosses_a_cut(pair: sg.PipelineStrategy) -> None:
    """Also for rows that differ from the traced ones."""
    torch.manual_seed(3)
    for module in (Packed(), Encoder(), nn.Sequential(Tells(), Hears())):
        dice = torch.Generator().manual_seed(0)
        module.double()
        for rows in (9, 3):
            x = torch.randint(0, 9, (rows, 6), generator=dice)
            y = torch.randint(0, 4, (rows,), generator=dice)
            x = x.double() if isinstance(module, nn.Sequential) else x
            one = by_hand(module, sgd, F.cross_entropy, x, y, batch=5)
            model = fitted(pair, module, x, y, batch=5)
            assert distance(one, model.module) < 1e-12, type(module)
            assert moved(module, one)
