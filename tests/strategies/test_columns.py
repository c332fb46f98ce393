"""Recurrent layers with `columns=`: chunks of time give the result of the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from stratagem.training.column_plan import fast_recurrence
from tests import spread
from tests.support import by_hand, cpus, distance, moved

pytestmark = pytest.mark.timeout(120)


class Stack(nn.Module):
    """An embedding, recurrent layers, and a head on every time step, the last one or the state."""

    def __init__(
        self, kind: Any, reads: str, *, first: bool = True, residual: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.reads, self.residual, self.first = reads, residual, first
        self.pairs = kind is nn.LSTM
        self.embedding = nn.Embedding(9, 6)
        self.rnn = kind(6, 6, 3, batch_first=first)
        self.norm = nn.LayerNorm(6)
        self.top = kind(6, 6, batch_first=first)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x if self.first else x.t())
        a, below = self.rnn(e)
        b, state = self.top(self.norm(a) + e if self.residual else a)
        if self.reads == "all":
            return self.head(b if self.first else b.transpose(0, 1)).transpose(1, 2)
        if self.reads == "last":
            return self.head(b[:, -1] if self.first else b[-1])
        h, g = (state[0], below[0]) if self.pairs else (state, below)
        return self.head(h[-1] + g[0] + e.mean(1 if self.first else 0))


def rows(reads: str, time: int = 7) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randint(0, 9, (13, time), generator=dice)
    return x, torch.randint(0, 9, (13, time) if reads == "all" else (13,), generator=dice)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


@pytest.fixture(scope="module", params=[(2, 3), (3, 4), (4, 2)], ids=str)
def columns(request: pytest.FixtureRequest) -> Iterator[sg.PipelineStrategy]:
    devices, chunks = request.param
    with sg.PipelineStrategy(cpus(devices), columns=chunks) as made:
        yield made


@pytest.mark.parametrize("reads", ["all", "last", "state"])
def test_chunks_of_time_are_exact(columns: sg.PipelineStrategy, reads: str) -> None:
    x, y = rows(reads)
    for kind, options in (
        (nn.LSTM, {}),
        (nn.GRU, {"residual": True}),
        (nn.RNN, {"first": False}),
    ):
        module = Stack(kind, reads, **options).double()
        one = by_hand(module, adam, F.cross_entropy, x, y, batch=5)
        model = sg.Model(Stack(kind, reads, **options).double(), columns)
        model.compile(optimizer=adam, loss="cross_entropy", clip_norm=1e3, metrics=["accuracy"])
        model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        assert distance(one, model.module) < 1e-12, kind
        assert moved(module, one)


def test_each_device_has_layers_of_its_own() -> None:
    x, y = rows("all", 12)
    with sg.PipelineStrategy(cpus(2), columns=4) as on:
        model = sg.Model(Stack(nn.LSTM, "all"), on)
        model.compile(optimizer=adam, loss="cross_entropy", check=False)
        on.run(spread._begin)
        model.fit(x, y, batch_size=13, verbose=0)
        seen = on.run(_seen)
        on.run(spread._end)
    assert seen[1] == 3  # two of the four recurrent layers, and the head; the first one also tries


def _seen() -> int:
    assert spread._watch is not None
    return len(spread._watch.first)


def refused(words: str, module: nn.Module, x: Any = None, **options: Any) -> None:
    with sg.PipelineStrategy(**{"devices": cpus(2), "columns": 2, **options}) as on:
        model = sg.Model(module, on)
        model.compile(optimizer="sgd", loss="mse")
        with pytest.raises(sg.StratagemError, match=words):
            model.fit(torch.randn(8, 5, 4) if x is None else x, torch.randn(8, 4), verbose=0)
        group: Any = on.replica_group
        assert group.replica is None


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.LSTM(4, 4, 2, bidirectional=kind == "both"), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "given":
            return self.a(x, (x[:2], x[:2]))[0]  # type: ignore[no-any-return]
        y, _ = self.a(x)
        if self.kind == "mixed":
            y = y.flip(0)
        return self.b(y)[0]  # type: ignore[no-any-return]


def test_what_has_no_columns() -> None:
    refused("the model has none", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    refused("'a' is bidirectional", Odd("both"))
    refused("'a' is given its first state", Odd("given"))
    refused("'flip' lies between recurrent layers", Odd("mixed"))
    refused("3 recurrent layers, and 4 stages", Odd("plain"), devices=cpus(4))
    for more in ({"microbatches": 4}, {"schedule": "gpipe"}, {"split": ["a"]}, {"memory": 1e9}):
        with pytest.raises(sg.UsageError, match="microbatches, schedule, split and memory out"):
            sg.PipelineStrategy(cpus(2), columns=2, **more)  # type: ignore[arg-type]
    with pytest.raises(sg.UsageError, match="columns=0"):
        sg.PipelineStrategy(cpus(2), columns=0)


def test_chunks_of_time_and_pieces_by_rows_are_tried_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are those of one device, while numbers are tried and after that."""
    with sg.PipelineStrategy(cpus(2), columns="auto") as strategy:
        for kind, reads, times, options in (
            (nn.LSTM, "all", (1, 2), {}),
            (nn.LSTM, "state", (), {}),  # by rows alone
            (nn.RNN, "last", (), {"first": False, "residual": True}),
        ):
            monkeypatch.setattr("stratagem.rules.chunk_choice._TIME", times)
            x, y = rows(reads)
            module = Stack(kind, reads, **options).double()
            one = by_hand(module, adam, F.cross_entropy, x, y, batch=5, epochs=4)
            model = sg.Model(Stack(kind, reads, **options).double(), strategy)
            model.compile(optimizer=adam, loss="cross_entropy")
            caplog.clear()
            model.fit(x, y, batch_size=5, epochs=4, shuffle=False, verbose=0)
            assert distance(one, model.module) < 1e-12, (kind, reads)
            assert moved(module, one)
            assert "by rows are the fastest" in caplog.text or times


@pytest.mark.parametrize(("machine", "on"), [("aarch64", False), ("x86_64", True)])
def test_kernels_of_recurrent_layers(
    machine: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ARM torch's own kernels run the layers; the user's setting is always restored."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    flags = torch.backends.mkldnn.set_flags
    before, *rest = flags(True, None, None, None)
    try:
        with pytest.raises(RuntimeError, match="here"), fast_recurrence():
            assert flags(None, None, None, None) == (on, *rest)
            raise RuntimeError("here")
        assert flags(None, None, None, None) == (True, *rest)
    finally:
        flags(before, None, None, None)
