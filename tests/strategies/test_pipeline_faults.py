"""A stage that raises, dies or stalls is named; a resumed training is exact."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from tests.clock import in_time
from tests.support import cpus, data, distance

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def two() -> Iterator[sg.PipelineStrategy]:
    made = sg.PipelineStrategy(cpus(2), 4, split=["3"])
    yield made
    made.close()


class Mishap(nn.Module):
    """Acts in a process other than the first, in the third batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.home = kind, 0, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) != 0.0 and os.getpid() != self.home:  # so it is not traced
            self.calls += 1
            if self.calls > 8:
                self.happen()
        return x

    def happen(self) -> None:
        if self.kind == "raise":
            raise ValueError("the ninth microbatch is one too many")
        if self.kind == "sleep":
            time.sleep(7.0)
            self.calls = -1000
        else:
            os.kill(os.getpid(), getattr(signal, self.kind))


def net(mishap: str = "", dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    tail = [Mishap(mishap)] if mishap else []
    inner = [nn.Dropout(dropout)] if dropout else [nn.Tanh()]
    layers = [nn.Linear(6, 8), *inner, nn.Linear(8, 8), nn.Linear(8, 8), *inner, nn.Linear(8, 4)]
    return nn.Sequential(*layers, *tail).double()


def fit(
    on: sg.Strategy | None, module: nn.Module, seed: int | None = None, **options: Any
) -> sg.Model:
    x, y = data(64)
    if seed is not None:
        torch.manual_seed(seed)
    model = sg.Model(copy.deepcopy(module), on)
    model.compile(optimizer="adam", loss="cross_entropy", check=False)
    model.fit(x.double(), y, batch_size=16, verbose=0, **options)
    return model


def test_an_exception_comes_back_with_its_traceback(two: sg.PipelineStrategy) -> None:
    with pytest.raises(sg.ReplicaFailed, match=r"(?s)replica 1.*in happen.*one too many"):
        fit(two, net("raise"))
    fit(two, net())  # it can be used again


def test_a_dead_stage_is_named(two: sg.PipelineStrategy) -> None:
    began = time.monotonic()
    with pytest.raises(sg.ReplicaLost, match="replica 1"):
        fit(two, net("SIGKILL"))
    in_time(time.monotonic() - began, 5.0)
    fit(two, net())


def test_a_stage_that_stopped_is_named() -> None:
    strategy = sg.PipelineStrategy(cpus(2), 4, split=["3"], patience=sg.Patience(answer=3.0))
    began = time.monotonic()
    with pytest.raises(sg.ReplicaStalled, match="replica 1"):
        fit(strategy, net("SIGSTOP"))
    in_time(time.monotonic() - began, 8.0)
    strategy.close()


def test_a_stage_that_is_late_is_named(
    two: sg.PipelineStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fit(two, net("sleep"))
    assert "waiting for replica 1, 5 s" in caplog.text


def test_ctrl_c_leaves_weights_and_state_of_all_stages(two: sg.PipelineStrategy) -> None:
    """The chief has the weights and state of every stage, and can resume."""

    class Interrupt(sg.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    x, y = data(64)
    one, many = (sg.Model(net(), on) for on in (None, two))
    for model in (one, many):
        model.compile(optimizer="adam", loss="cross_entropy")
        with pytest.raises(KeyboardInterrupt):
            model.fit(x.double(), y, batch_size=16, verbose=0, shuffle=False, callbacks=Interrupt())
        model.fit(x.double(), y, batch_size=16, verbose=0, shuffle=False)
    assert distance(one.module, many.module) < 1e-12
    assert threading.active_count() < 50


def test_dropout_is_repeatable_and_independent_of_the_schedule_and_the_split() -> None:
    found = []
    for options in ({"split": ["3"]}, {"split": ["1"]}, {"schedule": "gpipe"}, {"devices": 3}):
        with sg.PipelineStrategy(**{"devices": 2, "microbatches": 4} | _named(options)) as on:
            found.append(fit(on, net(dropout=0.5), 3, shuffle=False).module)
    for other in found[1:]:
        assert distance(found[0], other) < 1e-12
    with sg.PipelineStrategy(cpus(2), 4) as on:
        assert distance(found[0], fit(on, net(dropout=0.5), 4, shuffle=False).module) > 1e-4
        gone = fit(on, net(), 3, shuffle=False).module
    assert distance(found[0], gone) > 1e-4


def _named(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"devices": cpus(options.get("devices", 2))}


class Break(sg.callbacks.Callback):
    """Ends a training early."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("broken off")


@pytest.mark.parametrize("devices", [2, 3])
def test_a_training_goes_on_exactly(devices: int, tmp_path: Path) -> None:
    """With dropout and shuffling, after 6 of 12 batches; on as many stages, or another number."""
    plan = sg.Checkpoints(tmp_path / "run", every=1)
    with sg.PipelineStrategy(cpus(2), 4) as on:
        whole = fit(on, net(dropout=0.5), 3, epochs=3)
        with pytest.raises(RuntimeError, match="broken off"):
            fit(on, net(dropout=0.5), 3, epochs=3, checkpoint=plan, callbacks=Break(6))
    with sg.PipelineStrategy(cpus(devices), 4) as on:
        rest = fit(on, net(dropout=0.5), 99, epochs=3, checkpoint=plan, resume=True)
    assert distance(whole.module, rest.module) < 1e-12
    losses = [model.history.history["loss"] for model in (whole, rest)]  # type: ignore[union-attr]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_batch_norm_by_microbatch_and_in_one_piece() -> None:
    torch.manual_seed(0)
    normed = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    one = fit(None, normed, shuffle=False)
    with sg.PipelineStrategy(cpus(2), 1) as on:
        assert distance(one.module, fit(on, normed, shuffle=False).module) < 1e-12
    with sg.PipelineStrategy(cpus(2), 4, batch_norm="microbatch") as on:
        found = fit(on, normed, shuffle=False).module
    by_piece = normalised_by_pieces(normed, rows=1, pieces=4)
    assert int(found[1].num_batches_tracked) == 16  # type: ignore[index,arg-type]
    assert distance(by_piece, found) < 1e-12 < 1e-6 < distance(one.module, found)


def normalised_by_pieces(module: nn.Module, *, rows: int, pieces: int, epochs: int = 1) -> Any:
    """One device, by microbatches; rows of a mesh have statistics each for itself, and their mean
    at the end of an epoch."""
    module, (x, y) = copy.deepcopy(module), data(64)
    optimizer = torch.optim.Adam(module.parameters())
    kept = [{n: b.clone() for n, b in module.named_buffers()} for _ in range(rows)]
    for _ in range(epochs):
        for start in range(0, 64, 16):
            for number, piece in enumerate(torch.arange(start, start + 16).chunk(rows * pieces)):
                mine = kept[number // pieces]
                module.load_state_dict(mine, strict=False)
                found = F.cross_entropy(module(x[piece].double()), y[piece], reduction="sum") / 16
                found.backward()
                mine.update((n, b.clone()) for n, b in module.named_buffers())
            optimizer.step()
            optimizer.zero_grad()
        for name, value in kept[0].items():
            if value.is_floating_point():
                mean = torch.stack([mine[name] for mine in kept]).mean(0)
                for mine in kept:
                    mine[name] = mean
    module.load_state_dict(kept[0], strict=False)
    return module
