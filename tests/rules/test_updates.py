"""What users write travels between tasks as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stratagem.errors import UsageError
from stratagem.rules.ramp import Ramp
from stratagem.rules.staleness import (
    DelayCompensated,
    Drop,
    GapAware,
    LowerRate,
    Policy,
    ScaleDown,
)
from stratagem.rules.updates import Asynchronous, Synchronous, Updates, from_json


@pytest.mark.parametrize(
    "updates",
    [
        Synchronous(),
        Synchronous(spares=2, requeue=False),
        Asynchronous(),
        Asynchronous(
            staleness=[
                LowerRate(), LowerRate(0.25), Drop(), Drop(older_than=16), Drop(float("inf")),
                ScaleDown(), ScaleDown(linear=True), DelayCompensated(0.5, adaptive=False),
                GapAware(0.8),
            ],
            warmup=Ramp(steps=500),
            bound=3,
            buffer=10,
            requeue=False,
        ),
    ],
)  # fmt: skip
def test_there_and_back(updates: Updates) -> None:
    plain = json.loads(json.dumps(updates.to_json()))
    back = from_json(plain)
    assert back == updates and type(back) is type(updates) and hash(back) == hash(updates)
    assert type(updates).from_json(plain) == updates


def test_a_list_of_policies_is_kept_as_a_tuple() -> None:
    assert Asynchronous([ScaleDown()]) == Asynchronous((ScaleDown(),))


def test_what_is_left_out_has_its_default() -> None:
    assert from_json({"kind": "Asynchronous"}) == Asynchronous()
    assert Policy.from_json({"kind": "Drop"}) == Drop()


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"kind": "Synchronous", "spare": 1}, "no setting 'spare'; it has requeue, spares"),
        ({"kind": "Asynchronous", "delay": 1}, "no setting 'delay'"),
        ({"kind": "Sometimes"}, "does not describe"),
        ({}, "does not describe"),
        ({"kind": "Synchronous", "spares": -1}, "at least 0, not -1"),
        ({"kind": "Synchronous", "spares": True}, "not True"),
        ({"kind": "Synchronous", "requeue": "no"}, "True or False, not 'no'"),
        ({"kind": "Asynchronous", "buffer": 0}, "at least 1, not 0"),
        ({"kind": "Asynchronous", "bound": -1}, "at least 0, not -1"),
        ({"kind": "Asynchronous", "warmup": {"kind": "Ramp", "step": 1}}, "no setting 'step'"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "Hope"}]}, "no Policy .* 'Hope'.*Drop"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "Record"}]}, "no Policy"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "Drop", "times": 1}]}, "no setting"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "LowerRate", "times": 1}]}, "factor"),
    ],
)
def test_nothing_unknown_is_let_in(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_json(plain)


def test_a_kind_asks_for_its_own() -> None:
    with pytest.raises(UsageError, match="no Drop of the kind 'ScaleDown'; there are Drop"):
        Drop.from_json(ScaleDown().to_json())


@pytest.mark.parametrize(
    "wrong", [{"staleness": ScaleDown()}, {"staleness": ["drop"]}, {"warmup": 500}]
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="of Asynchronous is"):
        Asynchronous(**wrong)
