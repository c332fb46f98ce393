"""Replicas that share one set of parameters, and die while they write their slices."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.frontends import steps
from tests.strategies.test_elastic import elastic, killing

pytestmark = pytest.mark.timeout(120)

ROWS, BATCH, EPOCHS = 100, 16, 2

_updates = itertools.count(1)
_is_ready = False


def prepare_to_die(when: str, file: str) -> None:
    """Let a follower's fourth update kill it, before or after its write; 3 times in all."""
    global _is_ready
    if _is_ready:
        return
    _is_ready = True
    plain = torch.optim.Adam.step

    def step(self: Any, closure: Any = None) -> Any:
        dies = next(_updates) == 4
        if dies:
            with open(file, "a") as lines:
                print(os.getpid(), file=lines)
            dies = len(Path(file).read_text().split()) <= 3
        found = plain(self, closure) if when == "after" or not dies else None
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    torch.optim.Adam.step = step  # type: ignore[method-assign,assignment]


class Rows(Dataset[Any]):
    """A data set that kills the process that reads it."""

    def __init__(self, when: str, file: Path) -> None:
        self.when, self.file = when, str(file)
        dice = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, 128, generator=dice)
        self.y = torch.randint(0, 4, (ROWS,), generator=dice)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        if self.when == "slowly":
            time.sleep(0.002)
        elif sg.current_replica().index == 2 and self.when:
            prepare_to_die(self.when, self.file)
        return self.x[i], self.y[i]


class Writes(sg.callbacks.Callback):
    """Writes to the weights between two batches."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            with torch.no_grad():
                self.model.module[0].bias.add_(0.01)


def train(strategy: Any, when: str, file: Path, **options: Any) -> Any:
    torch.manual_seed(5)
    with strategy.scope(check=False):
        torch.manual_seed(0)
        model = sg.Model(nn.Sequential(nn.Linear(128, 1024), nn.Tanh(), nn.Linear(1024, 4)))
        model.compile(
            lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-3),
            "cross_entropy",
            metrics=["accuracy"],
            **options,
        )
    data = DataLoader(Rows(when, file), BATCH, shuffle=True)
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Writes()]).history
    assert model.optimizer is not None
    state = [s[name].clone() for s in model.optimizer.state.values() for name in sorted(s)]
    return [*(p.detach().clone() for p in model.module.parameters()), *state], history


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip_norm": 0.5}], ids=["", "clipped"])
def test_deaths_within_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, options: dict[str, Any]
) -> None:
    """The update is undone and redone, whether other replicas have written their slices or not."""
    made = []
    plain = steps.Sliced.__init__

    def noted(self: Any, *args: Any) -> None:
        plain(self, *args)
        made.append(len(self._factors))

    monkeypatch.setattr(steps.Sliced, "__init__", noted)
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic()) as several:
        expected = train(one, "", tmp_path / "kills", **options)
        assert not made
        found = train(several, when, tmp_path / "kills", **options)
    assert len((tmp_path / "kills").read_text().split()) >= (2 if options else 3)
    assert len(made) > 2 and all(made) == (not options), "slices, and factors where they are used"
    assert len(found[0]) == len(expected[0])
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)
    for name in ("loss", "accuracy"):
        assert found[1][name] == pytest.approx(expected[1][name], abs=1e-5), name


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kills_at_any_moment(tmp_path: Path, seed: int) -> None:
    with closing(sg.MirroredStrategy(["cpu:0"])) as one, closing(elastic()) as several:
        expected = train(one, "slowly", tmp_path / "kills")
        with killing(several, seed, 3):
            found = train(several, "slowly", tmp_path / "kills")
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)
