"""Two real processes that divide the layers of a model, as `plan` measures them."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.plan.divided_profile import with_played
from stratagem.plan.layer_profile import with_layers
from stratagem.plan.measure import rehearse
from stratagem.plan.profile import DividedLayers
from stratagem.training.dry_run import DryRun, DryRunHandedOver, instead_of_fit
from tests.plan.support import profile

ROWS = 6
CUT = DividedLayers(1.0, 1.0, 0.5, 100, 2)


class Only(nn.Module):
    """Refuses other numbers of rows, in other processes than the one that has made it, too."""

    def __init__(self, *allowed: int, here: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.allowed, self.here, self.pid = allowed, here, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        at_home = os.getpid() == self.pid and len(x) in self.here
        if len(x) not in self.allowed and not at_home:
            raise ValueError(f"no {len(x)} rows, please")
        return x


class Echo(nn.Module):
    """An autoencoder that returns its input, too, which has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x), x


def dry_run(net: nn.Module, loss: Any = None) -> tuple[DryRun, Tensor]:
    trial = DryRun(
        net,
        torch.randn(ROWS, 8),
        loss or (lambda x: net(x).sum()),
        lambda: None,
        inputs=lambda batch: batch,
        arguments=lambda names, given: [given],
        unpiped="",
        undivided="",
    )
    return trial, trial.batch


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("seconds", "passes"), [(1e-3, 16), (1.5, 4)])
def test_passes_with_the_trials_own_loss(seconds: float, passes: int) -> None:
    """Under its autocast, of both replicas' rows, from no gradients, for a bounded time."""
    net, seen, said = Echo(), [], list[str]()

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made, _ = net(x)
        empty = all(p.grad is None for p in net.parameters())
        seen.append((made.dtype, len(made), empty))
        return (made - x).float().square().mean()

    trial, x = dry_run(net, loss)
    before = profile(batch=ROWS, forward=seconds, backward=0.0, divided=CUT)
    made = with_played(before, trial, x, said.append)
    assert made.divided is not None and 0 < made.divided.played < math.inf
    assert seen == [(torch.bfloat16, 2 * ROWS, True)] * passes
    assert said == ([] if passes == 16 else ["4 passes with the layers divided over 2, 12s"])
    assert "forward" not in vars(net)


@pytest.mark.timeout(60)
def test_a_failure_of_divided_layers_does_not_end_the_plan() -> None:
    """It fails in one process only, and the other one does not wait for it."""
    net = nn.Sequential(nn.Linear(8, 16), Only(ROWS - 1, here=(2 * ROWS,)), nn.Linear(16, 8))
    trial, x = dry_run(net)
    made = with_played(profile(batch=ROWS, divided=CUT), trial, x, lambda text: None)
    assert made.divided is None and "no 12 rows, please" in made.undivided


def test_nor_does_a_failure_of_layers_that_are_measured() -> None:
    """A model of one batch size has neither microbatches nor the rows of two replicas."""
    net = nn.Sequential(nn.Linear(8, 16), Only(ROWS), nn.Linear(16, 8))
    trial, x = dry_run(net)
    made = with_layers(profile(batch=ROWS), trial, x, list(net.parameters()))
    assert made.unpiped == "it failed when it was measured, with ValueError: no 3 rows, please"
    assert "no 12 rows" in made.undivided and not made.layers and made.divided is None


class Half(nn.Module):
    """Refuses all but bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16:
            raise ValueError(f"no {x.dtype}, please")
        return x


@pytest.mark.timeout(60)
def test_layers_and_stages_are_measured_in_the_models_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stratagem.plan.measure._SECONDS", 0.05)
    monkeypatch.setattr("stratagem.plan.stage_profile._SECONDS", 0.02)
    monkeypatch.setattr("stratagem.plan.measure.counts", lambda wanted: [2])
    monkeypatch.setattr("stratagem.plan.measure.crowd", lambda *given: ((2, 1e-3),))
    model = sg.Model(nn.Sequential(nn.Linear(8, 16), Half(), nn.Linear(16, 8)))
    model.compile("adam", "cross_entropy", precision="bfloat16")
    trials: list[DryRun] = []
    with instead_of_fit(trials.append), suppress(DryRunHandedOver):
        model.fit(torch.randn(ROWS, 8), torch.randint(0, 8, (ROWS,)))
    before = deepcopy(trials[0].module.state_dict())
    found = rehearse(trials[0])
    assert (found.unpiped, found.undivided) == ("", "")
    assert found.stage_times and found.divided is not None and found.divided.played
    assert found.divided.update > 0  # made with the training's own optimizer and weights
    assert trials[0].optimizer is not None and not trials[0].optimizer.state
    assert all(torch.equal(t, before[name]) for name, t in trials[0].module.state_dict().items())
