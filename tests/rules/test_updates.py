"""The settings `updates=`: they travel as plain values, and act on stale gradients."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.rules.updates import (
    Asynchronous,
    DelayCompensated,
    Drop,
    GapAware,
    LowerRate,
    Policy,
    Ramp,
    ScaleDown,
    StepNorm,
    Synchronous,
    Updates,
    from_json,
)


@pytest.mark.parametrize(
    "updates",
    [
        Synchronous(),
        Synchronous(spares=2, requeue=False),
        Asynchronous(),
        Asynchronous(
            staleness=[
                LowerRate(),
                LowerRate(0.25),
                Drop(),
                Drop(older_than=16),
                Drop(float("inf")),
                ScaleDown(),
                ScaleDown(linear=True),
                DelayCompensated(0.5, adaptive=False),
                GapAware(0.8),
            ],
            warmup=Ramp(steps=500),
            bound=3,
            buffer=10,
            requeue=False,
        ),
    ],
)
def test_there_and_back(updates: Updates) -> None:
    plain = json.loads(json.dumps(updates.to_json()))
    back = from_json(plain)
    assert back == updates and type(back) is type(updates) and hash(back) == hash(updates)


def test_a_list_of_policies_is_kept_as_a_tuple() -> None:
    assert Asynchronous([ScaleDown()]) == Asynchronous((ScaleDown(),))


def test_what_is_left_out_has_its_default() -> None:
    assert from_json({"kind": "Asynchronous"}) == Asynchronous()
    assert from_json({"kind": "Drop"}) == Drop()


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"kind": "Synchronous", "spare": 1}, "'spare'.* Do all tasks run one"),
        ({"kind": "Asynchronous", "delay": 1}, "unexpected .* 'delay'"),
        ({"kind": "Sometimes"}, "there is no kind"),
        ({}, "there is no kind"),
        ({"kind": "Synchronous", "spares": -1}, "at least 0, not -1"),
        ({"kind": "Synchronous", "spares": True}, "not True"),
        ({"kind": "Synchronous", "requeue": "no"}, "True or False, not 'no'"),
        ({"kind": "Asynchronous", "buffer": 0}, "at least 1, not 0"),
        ({"kind": "Asynchronous", "bound": -1}, "at least 0, not -1"),
        ({"kind": "Asynchronous", "warmup": {"kind": "Ramp", "step": 1}}, "unexpected .* 'step'"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "Hope"}]}, "no kind .* 'Hope'.*Drop"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "Record"}]}, "no kind"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "Drop", "times": 1}]}, "unexpected"),
        ({"kind": "Asynchronous", "staleness": [{"kind": "LowerRate", "times": 1}]}, "unexpected"),
    ],
)
def test_nothing_unknown_is_let_in(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_json(plain)


@pytest.mark.parametrize(
    "wrong", [{"staleness": ScaleDown()}, {"staleness": ["drop"]}, {"warmup": 500}]
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="of Asynchronous is"):
        Asynchronous(**wrong)


EVERY: list[Policy] = [
    LowerRate(),
    LowerRate(0.1),
    Drop(),
    Drop(0),
    ScaleDown(),
    ScaleDown(2.0),
    ScaleDown(linear=True),
    DelayCompensated(),
    DelayCompensated(adaptive=False),
    DelayCompensated(3.0),
    GapAware(),
    GapAware(0.0),
]


@pytest.mark.parametrize("policy", EVERY, ids=str)
def test_neutral_when_nothing_is_stale(policy: Policy) -> None:
    assert policy.factor(0, 1) == 1.0 and policy.rate(0, 1) == 1.0
    assert policy.factor(0, 16) == 1.0
    assert policy.gap_factor(0.0, 0.3) == 1.0 and policy.gap_factor(0.0, 0.0) == 1.0
    grad = torch.tensor([1.0, -2.0, 0.0, 1e30, 1e-30])
    weights = torch.tensor([1e8, 3.0, 0.0, 1e-8, 1.0])
    memory: dict[str, torch.Tensor] = {}
    for _ in range(3):
        given = grad.clone()
        policy.compensate(given, weights, weights.clone(), memory)
        assert torch.equal(given, grad)


def test_numbers() -> None:
    assert LowerRate().rate(7, 16) == 0.25 and LowerRate(0.1).rate(0, 2) == 0.1
    assert LowerRate().factor(7, 16) == 1.0
    assert [ScaleDown().factor(tau, 4) for tau in (0, 3, 8)] == [1.0, 0.5, 1 / 3]
    assert [ScaleDown(linear=True).factor(tau, 4) for tau in (0, 1, 4)] == [1.0, 1.0, 0.25]
    assert [Drop().factor(tau, 4) for tau in (8, 9)] == [1.0, None]
    assert [Drop(3).factor(tau, 4) for tau in (3, 4)] == [1.0, None]
    assert [Drop(0).factor(tau, 4) for tau in (0, 1)] == [1.0, None]
    assert GapAware().gap_factor(3.0, 1.5) == pytest.approx(1 / 3)
    assert GapAware().gap_factor(3.0, 0.0) == 1.0


@given(st.integers(0, 10**9), st.integers(1, 1000))
def test_drop_of_infinite_age_is_plain(tau: int, workers: int) -> None:
    assert Drop(math.inf).factor(tau, workers) == 1.0


def random_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(50), torch.randn(50), torch.randn(50)


def test_constant_compensation() -> None:
    grad, now, then = random_tensors()
    for policy, lam in (
        (DelayCompensated(adaptive=False), 0.04),
        (DelayCompensated(0.3, False), 0.3),
    ):
        given = grad.clone()
        policy.compensate(given, now, then, {})
        torch.testing.assert_close(given, grad + lam * grad * grad * (now - then))


@pytest.mark.parametrize(
    ("policy", "lam"), [(DelayCompensated(), 2.0), (DelayCompensated(0.7), 0.7)]
)
def test_adaptive_compensation(policy: Policy, lam: float) -> None:
    memory: dict[str, torch.Tensor] = {}
    square = torch.zeros(50)
    for step in range(4):
        grad, now, then = (t * (step + 1) for t in random_tensors())
        square = 0.95 * square + 0.05 * grad * grad
        expected = grad + lam / (square + 1e-7).sqrt() * grad * grad * (now - then)
        kept = now.clone(), then.clone()
        policy.compensate(grad, now, then, memory)
        torch.testing.assert_close(grad, expected)
        assert torch.equal(now, kept[0]) and torch.equal(then, kept[1])


@pytest.mark.parametrize("adaptive", [True, False])
def test_compensation_of_strength_0_is_plain(adaptive: bool) -> None:
    grad, now, then = random_tensors()
    given = grad.clone()
    DelayCompensated(0.0, adaptive).compensate(given, now, then, {})
    assert torch.equal(given, grad)


@pytest.mark.parametrize("adaptive", [True, False])
def test_compensation_of_any_other_strength_is_not_plain(adaptive: bool) -> None:
    """A gradient is changed in proportion to the strength, and only where the weights moved."""
    grad, now, then = random_tensors()
    then[:10] = now[:10]
    changes = []
    for strength in (0.001, 0.002):
        given = grad.clone().double()
        policy = DelayCompensated(strength, adaptive)
        policy.compensate(given, now.double(), then.double(), {})
        changes.append(given - grad)
    assert bool((changes[0][10:] != 0).all()) and not changes[0][:10].any()
    torch.testing.assert_close(2 * changes[0], changes[1])


def test_what_the_engine_must_keep() -> None:
    assert [p.needs_then for p in (LowerRate(), Drop(), ScaleDown())] == [False] * 3
    assert DelayCompensated().needs_then and not DelayCompensated().needs_gap
    assert GapAware().needs_then and GapAware().needs_gap


def test_the_usual_length_of_a_step() -> None:
    norm = StepNorm(0.9)
    assert norm.value == 0.0
    norm.add(2.0)
    assert norm.value == 2.0
    norm.add(4.0)
    assert norm.value == pytest.approx(2.2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LowerRate(0),
        lambda: LowerRate(-1),
        lambda: Drop(-1),
        lambda: Drop(math.nan),
        lambda: ScaleDown(0),
        lambda: ScaleDown(linear="yes"),
        lambda: DelayCompensated(-1),
        lambda: DelayCompensated("2"),
        lambda: DelayCompensated(adaptive=1),
        lambda: GapAware(1.0),
        lambda: GapAware(-0.1),
        lambda: Ramp(-1),
        lambda: Ramp(2.5),
        lambda: Ramp(True),
    ],
)
def test_policies_that_make_no_sense(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(UsageError, match="not"):
        wrong()


@given(st.integers(0, 50), st.integers(1, 40), st.integers(0, 60))
def test_ramp(steps: int, workers: int, version: int) -> None:
    ramp = Ramp(steps)
    now = ramp.allowed(version, workers)
    assert 1 <= now <= workers and now <= ramp.allowed(version + 1, workers)
    assert ramp.allowed(steps, workers) == workers
    if steps:
        assert ramp.allowed(0, workers) == 1
        fair = 1 + (workers - 1) * min(1, version / steps)
        assert fair - 1 < now <= fair + 1e-9
    # who works goes on when another leaves: at most one place is lost with one worker
    assert now - 1 <= ramp.allowed(version, workers - 1) <= now
