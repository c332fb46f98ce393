"""Custom loops: every case on every placement, compared with plain torch on one device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.conformance import loop_cases
from tests.conformance.net import Result, assert_alike, assert_refused, assert_spread, closed
from tests.conformance.placements import PLACEMENTS
from tests.spread import Work, watched

pytestmark = pytest.mark.timeout(120)


@cache
def alone(name: str, dtype: torch.dtype) -> tuple[Result, Work]:
    """The case on one device: plain torch."""
    return watched(partial(loop_cases.play, name, loop_cases.OneDevice(dtype)), keras=False)


@pytest.fixture(scope="module")
def placed(request: pytest.FixtureRequest) -> Iterator[tuple[str, sg.Strategy]]:
    for strategy in closed(PLACEMENTS[request.param].make()):
        yield request.param, strategy


@pytest.mark.parametrize(
    ("placed", "name"), [*loop_cases.case.cells()], indirect=["placed"], scope="module"
)
def test_a_loop_is_that_of_one_device(placed: tuple[str, Any], name: str) -> None:
    place, strategy = placed
    placement, case = PLACEMENTS[place], loop_cases.case[name]
    run = partial(strategy.run, loop_cases.spread, name, strategy, place)
    if assert_refused(run, placement, case, "own loop"):
        return
    wanted, work = alone(name, placement.dtype)
    results, spread = watched(run, strategy, keras=False)
    known = [each for each in results if each is not None]
    assert known
    for found in known:
        assert_alike(found, wanted, case, placement.dtype)
    assert_spread(work, spread, placement, case, exact=True)
