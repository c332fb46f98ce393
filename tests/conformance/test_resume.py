"""A training that is broken off within an epoch goes on elsewhere, to the answer of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.conformance import fit_cases
from tests.conformance.net import assert_alike, plain
from tests.conformance.placements import PLACEMENTS
from tests.frontends.test_resume import some_of
from tests.support import moved

pytestmark = pytest.mark.timeout(120)

#: from where to where; `make test` shows the first two
WAYS = [
    ("mirrored 2", "mirrored 3"),
    ("mirrored 3", "servers 2"),
    ("servers 2", "stages 2"),
    ("stages 2", "sharded 2"),
    ("sharded 2", "divided 2"),
    ("divided 2", "central 2"),
    ("central 2", "mesh 2x2"),
    ("mesh 2x2", "elastic 2"),
]
CASE = "Adam"
#: steps of an epoch of 19 rows; the checkpoint is that of the second epoch's second batch
STEPS, AT = 3, 4


def fit(place: str, folder: Path, *, resume: bool) -> dict[str, Any]:
    """Train with a checkpoint after each batch; the weights, and the last epoch's loss."""
    job = fit_cases.make(CASE, torch.float32)
    job.judged, job.fit = False, {"checkpoint": sg.Checkpoints(folder, every=1, keep=99)}
    job.fit["resume"] = resume
    with PLACEMENTS[place].make() as strategy:
        found = fit_cases.fitted(job, strategy)
    del found["loss 0"]
    return found


@pytest.mark.parametrize(
    ("first", "then"),
    [pytest.param(*way, marks=[pytest.mark.exhaustive] * (i > 1)) for i, way in enumerate(WAYS)],
)
def test_a_fit_goes_on_elsewhere(first: str, then: str, tmp_path: Path) -> None:
    fit(first, tmp_path / "whole", resume=False)
    assert len([each for each in (tmp_path / "whole").iterdir() if each.is_dir()]) >= 2 * STEPS
    folder = some_of(tmp_path / "whole", tmp_path / "some", AT)
    found = fit(then, folder, resume=True)
    job = fit_cases.make(CASE, torch.float32)
    start = fit_cases.make(CASE, torch.float32).module
    job.judged = False
    wanted = fit_cases.by_hand(job)
    del wanted["loss 0"]
    assert moved(start, job.module)
    assert_alike(found, plain(wanted), fit_cases.case[CASE], torch.float32)
