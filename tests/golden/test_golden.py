"""The weights of small trainings, as they were recorded: a move of the internals moves none."""

from __future__ import annotations

import json

import pytest

from tests.golden.cases import CASES, LAUNCHED, QUICK, RECORD, STRATEGIES, apart, data, outcomes

pytestmark = pytest.mark.timeout(120)
GOLDEN = json.loads(RECORD.read_text())


def tolerance(case: str) -> float:
    """Keras on torch makes a loss float32, which each kind of processor rounds its own way."""
    return 1e-6 if "keras" in case else 1e-12


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in (*STRATEGIES, *LAUNCHED)
    ],
)
def test_weights_are_those_that_were_recorded(name: str) -> None:
    found, golden = outcomes(name), GOLDEN[name]
    assert found.keys() == golden.keys()
    for case, values in found.items():
        if isinstance(values, str) or isinstance(golden[case], str):
            assert values == golden[case], case
        else:
            assert apart(values, golden[case]) < tolerance(case), case


def test_what_is_recorded_was_trained() -> None:
    """Weights have moved, and every rule that is exact gives the answer of one device."""
    plain = GOLDEN["no strategy"]
    assert list(plain) == CASES
    assert apart(plain["model plain"], plain["model accumulated"]) > 1e-3
    assert apart(plain["model plain"], plain["loop plain"]) < 1e-12, "both are torch's loop"
    other = {"servers spares", "servers buffer"}  # other batches; other updates
    for name in GOLDEN.keys() - other:
        for case, values in GOLDEN[name].items():
            if isinstance(values, list):
                assert apart(values, plain[case]) < tolerance(case), name
    assert apart(GOLDEN["servers buffer"]["model plain"], plain["model plain"]) > 1e-3
    assert data(alike=True)[0][:8].equal(data(alike=True)[0][8:16])
