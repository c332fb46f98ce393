"""Layers and stages of real models, as `plan` measures them."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.plan.layer_profile import with_layers
from stratagem.plan.measure import rehearse
from stratagem.training.dry_run import DryRun, DryRunHandedOver, instead_of_fit
from tests.plan.support import profile

ROWS = 6


class Only(nn.Module):
    """Refuses all but six rows."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != ROWS:
            raise ValueError(f"no {len(x)} rows, please")
        return x


def test_a_failure_of_layers_that_are_measured_does_not_end_the_plan() -> None:
    """A model of one batch size has no microbatches."""
    net = nn.Sequential(nn.Linear(8, 16), Only(), nn.Linear(16, 8))
    trial = DryRun(
        net,
        torch.randn(ROWS, 8),
        lambda x: net(x).sum(),
        lambda: None,
        inputs=lambda batch: batch,
        arguments=lambda names, given: [given],
        unpiped="",
    )
    made = with_layers(profile(batch=ROWS), trial, trial.batch, list(net.parameters()))
    assert made.unpiped == "it failed when it was measured, with ValueError: no 3 rows, please"
    assert not made.layers and made.footprint is not None


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
    assert not found.unpiped and found.stage_times
    assert trials[0].optimizer is not None and not trials[0].optimizer.state
    assert all(torch.equal(t, before[name]) for name, t in trials[0].module.state_dict().items())
