"""Keras: every case on every placement, compared with plain Keras on one device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.conformance import keras_cases
from tests.conformance.net import Result, assert_alike, assert_refused, assert_spread, closed
from tests.conformance.placements import PLACEMENTS
from tests.spread import Work, watched

pytestmark = pytest.mark.timeout(120)


@cache
def alone(name: str) -> tuple[Result, Work]:
    """The case on one device: plain Keras."""
    return watched(partial(keras_cases.play, name))


@pytest.fixture(scope="module")
def placed(request: pytest.FixtureRequest) -> Iterator[tuple[str, sg.Strategy]]:
    for strategy in closed(PLACEMENTS[request.param].make()):
        yield request.param, strategy


@pytest.mark.parametrize(
    ("placed", "name"), [*keras_cases.case.cells()], indirect=["placed"], scope="module"
)
def test_a_keras_model_is_that_of_one_device(placed: tuple[str, Any], name: str) -> None:
    place, strategy = placed
    placement, case = PLACEMENTS[place], keras_cases.case[name]
    run = partial(keras_cases.play, name, strategy)
    if assert_refused(run, placement, case, "Keras"):
        return
    wanted, work = alone(name)
    found, spread = watched(run, strategy)
    found = {name: value for name, value in found.items() if name in wanted}  # servers count more
    assert_alike(found, wanted, case, torch.float32)
    assert_spread(work, spread, placement, case, exact=False)
