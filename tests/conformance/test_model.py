"""`sg.Model`: every case on every placement, compared with a loop by hand on one device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.conformance import fit_cases
from tests.conformance.net import Result, assert_alike, assert_refused, assert_spread, closed
from tests.conformance.placements import PLACEMENTS
from tests.spread import Work, watched

pytestmark = pytest.mark.timeout(120)


@cache
def alone(name: str, dtype: torch.dtype) -> tuple[Result, Work]:
    """The case on one device, by hand."""
    return watched(
        lambda: fit_cases.by_hand(fit_cases.make(name, dtype)), trained=True, keras=False
    )


@pytest.fixture(scope="module")
def placed(request: pytest.FixtureRequest) -> Iterator[tuple[str, sg.Strategy]]:
    for strategy in closed(PLACEMENTS[request.param].make()):
        yield request.param, strategy


@pytest.mark.parametrize(
    ("placed", "name"), [*fit_cases.case.cells()], indirect=["placed"], scope="module"
)
def test_a_fit_is_that_of_one_device(placed: tuple[str, Any], name: str) -> None:
    place, strategy = placed
    placement, case = PLACEMENTS[place], fit_cases.case[name]
    run = partial(fit_cases.fitted, fit_cases.make(name, placement.dtype), strategy)
    if assert_refused(run, placement, case, "sg.Model"):
        return
    wanted, work = alone(name, placement.dtype)
    found, spread = watched(run, strategy, trained=True, keras=False)
    assert_alike(found, wanted, case, placement.dtype)
    assert_spread(work, spread, placement, case, exact=False)
