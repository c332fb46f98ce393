"""Recurrent layers with `columns=`: chunks of time give the result of the whole sequence."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from stratagem.training.column_plan import fast_recurrence
from tests import spread
from tests.clock import in_time
from tests.strategies.test_pipeline_faults import Break, Mishap
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


READS = ("all", "last", "state")
KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (nn.LSTM, {}),
    (nn.GRU, {"residual": True}),
    (nn.RNN, {"first": False}),
)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_chunks_of_time_are_exact(columns: sg.PipelineStrategy, turn: int) -> None:
    """Every kind of layer, each with another part of the output that is read."""
    for (kind, options), reads in zip(KINDS, READS[turn:] + READS[:turn], strict=True):
        x, y = rows(reads)
        module = Stack(kind, reads, **options).double()
        one = by_hand(module, adam, F.cross_entropy, x, y, batch=5)
        model = fitted(columns, module, x, y, clip_norm=1e3, metrics=["accuracy"])
        assert distance(one, model.module) < 1e-12, kind
        assert moved(module, one)


def fitted(
    on: sg.Strategy | None, module: nn.Module, x: Tensor, y: Tensor, **options: Any
) -> sg.Model:
    fit = {name: options.pop(name) for name in _OF_FIT if name in options}
    model = sg.Model(copy.deepcopy(module), on)
    model.compile(optimizer=adam, loss="cross_entropy", **options)
    model.fit(x, y, **{"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0, **fit})  # type: ignore[arg-type]
    return model


_OF_FIT = ("epochs", "sample_weight", "validation_data", "checkpoint", "resume", "callbacks")


def test_clipping_accumulation_and_ignored_targets(columns: sg.PipelineStrategy) -> None:
    """By the norm of all devices; whole batches and moments of time are left out of the loss."""
    (x, y), module = rows("all"), Stack(nn.LSTM, "all").double()
    y[:, ::3], y[2:7] = -100, -100
    clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)  # noqa: E731
    how: dict[str, Any] = {"batch": 5, "accumulate": 2}
    one = by_hand(module, adam, F.cross_entropy, x, y, before_step=clip, **how)
    model = fitted(columns, module, x, y, clip_norm=0.05, accumulate=2)
    assert distance(one, model.module) < 1e-8  # the norm is not rounded as torch rounds it
    assert distance(one, by_hand(module, adam, F.cross_entropy, x, y, **how)) > 1e-3


def test_sample_weights_validation_and_other_calls(columns: sg.PipelineStrategy) -> None:
    (x, y), module = rows("last"), Stack(nn.GRU, "last").double()
    weight = torch.rand(13, generator=torch.Generator().manual_seed(1)).double()
    options: dict[str, Any] = {"sample_weight": weight, "validation_data": (x, y)}
    found = []
    for on in (None, columns):
        model = fitted(on, module, x, y, metrics=["accuracy"], **options)
        history = model.history.history  # type: ignore[union-attr]
        del history["examples_per_second"]
        scores = model.evaluate(x, y, verbose=0)
        found.append((model.module, [*history.values(), [*scores.values()]], model.predict(x)))
    (one, numbers, guessed), (other, *told) = found
    assert distance(one, other) < 1e-12 and moved(module, one)
    assert distance(one, fitted(None, module, x, y).module) > 1e-3
    for expected, values in zip(numbers, told[0], strict=True):
        assert values == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(guessed, told[1], atol=1e-12)


def test_mixed_precision(columns: sg.PipelineStrategy) -> None:
    """Chunks are rounded separately."""
    (x, y), module = rows("last"), Stack(nn.LSTM, "last")
    one = fitted(None, module, x, y, precision="bfloat16").module
    found = fitted(columns, module, x, y, precision="bfloat16").module
    assert distance(one, found) < 0.01 < distance(module, found)
    assert distance(one, fitted(None, module, x, y).module) > 0.01


def test_files_and_a_training_that_goes_on(columns: sg.PipelineStrategy, tmp_path: Path) -> None:
    """A checkpoint in mid-epoch, and one plain file, with and without columns."""
    (x, y), module = rows("state"), Stack(nn.LSTM, "state").double()
    whole = by_hand(module, adam, F.cross_entropy, x, y, batch=5, epochs=3)
    plan: dict[str, Any] = {"checkpoint": sg.Checkpoints(tmp_path / "run", every=1), "epochs": 3}
    with pytest.raises(RuntimeError, match="broken off"):
        fitted(columns, module, x, y, callbacks=Break(5), **plan)
    rest = fitted(None, module, x, y, resume=True, **plan)
    assert distance(whole, rest.module) < 1e-12
    path = fitted(columns, module, x, y, epochs=1).save(tmp_path / "model.safetensors")
    for on in (None, columns):
        model = sg.Model(Stack(nn.LSTM, "state").double(), on)
        model.compile(optimizer=adam, loss="cross_entropy")
        model.load(path)
        model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        assert distance(whole, model.module) < 1e-12


class Ending(Stack):
    """Acts on the last device, in the third batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.LSTM, "all")
        self.mishap = Mishap(kind)
        self.mishap.calls = 6

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mishap(super().forward(x))
        return found


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP", "raise"])
def test_a_device_that_fails_is_named(kind: str) -> None:
    errors = {"raise": sg.ReplicaFailed, "SIGKILL": sg.ReplicaLost, "SIGSTOP": sg.ReplicaStalled}
    with sg.PipelineStrategy(cpus(2), columns=3, patience=sg.Patience(answer=3.0)) as on:
        began = time.monotonic()
        with pytest.raises(errors[kind], match="replica 1"):
            fitted(on, Ending(kind), *rows("all"), check=False)
        in_time(time.monotonic() - began, 8.0)


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
