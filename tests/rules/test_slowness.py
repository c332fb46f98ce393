"""Slow tasks are named with the reason; jitter names none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.rules.slowness import STEPS, Finding, Sample, SlowRule

#: seconds a step of a replica that is as fast as the others
USUAL = {"compute": 0.010, "load": 0.002, "link": 0.003}
REASONS = {"compute": "computes", "load": "loads data", "link": "link"}


def drive(
    dice: random.Random, tasks: int, steps: int, line: int, slow: dict[str, float], jitter: float
) -> list[Finding]:
    """Feed samples of `line` steps of every task; the last task is slower by `slow` seconds."""
    rule, found = SlowRule(), []
    for _ in range(0, steps, line):
        for task in range(tasks):
            more = slow if task == tasks - 1 else {}
            sums = dict.fromkeys(USUAL, 0.0)
            for _ in range(line):
                for kind, seconds in USUAL.items():
                    shake = 1 + jitter * dice.uniform(-1, 1)
                    sums[kind] += (seconds + more.get(kind, 0.0)) * shake
            mean = {kind: each / line for kind, each in sums.items()}
            found += [rule.add(f"worker {task}", Sample(line, **mean, wait=0.0))]
    return [each for each in found if each is not None]


def gauss(dice: random.Random, tasks: int) -> list[Finding]:
    """A thousand steps whose whole length varies by 20% (a standard deviation), one a line."""
    rule, found = SlowRule(), []
    for _ in range(1000):
        for task in range(tasks):
            compute = 0.015 * max(0.1, dice.gauss(1, 0.2))
            found += [rule.add(str(task), Sample(1, compute, 0, 0, 0))]
    return [each for each in found if each is not None]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from([1, 3, 20, 100]))
def test_jitter_names_nobody(seed: int, tasks: int, line: int) -> None:
    assert drive(random.Random(seed), tasks, 1000, line, {}, 0.2) == []


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_nor_does_jitter_of_whole_steps(seed: int, tasks: int) -> None:
    assert gauss(random.Random(seed), tasks) == []


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 8),
    st.sampled_from([1, 3, 7, 20]),
    st.sampled_from(sorted(USUAL)),
    st.floats(1.8, 10.0),
)
def test_the_slow_one_is_named_once_with_the_reason(
    seed: int, tasks: int, line: int, kind: str, times: float
) -> None:
    own = sum(USUAL.values())
    found = drive(random.Random(seed), tasks, 3 * STEPS, line, {kind: own * (times - 1)}, 0.2)
    assert [(each.task, each.reason) for each in found] == [(f"worker {tasks - 1}", REASONS[kind])]
    assert f"worker {tasks - 1}" in str(found[0])


def feed(rule: SlowRule, steps: int, times: float, **of_slow: float) -> list[int]:
    """Return the steps at which the second of two tasks is named, which takes `times` as long."""
    named = []
    for step in range(1, steps + 1):
        rule.add("a", Sample(1, 0.01, 0, 0, 0))
        if rule.add("b", Sample(1, 0.01 * times, 0, 0, 0, **of_slow)) is not None:
            named.append(step)
    return named


@pytest.mark.parametrize(("times", "named"), [(1.49, []), (1.51, [STEPS])])
def test_after_twenty_steps_of_half_as_long_again(times: float, named: list[int]) -> None:
    assert feed(SlowRule(), 200, times) == named


def test_whoever_was_fast_again_can_be_named_again() -> None:
    rule = SlowRule()
    assert feed(rule, 30, 2.0) == [STEPS]
    assert feed(rule, 30, 1.0) == []
    assert len(feed(rule, 30, 2.0)) == 1


def test_what_is_not_slow() -> None:
    """Rare pauses, a larger share of a small batch, and tiny differences are not slow."""
    rule = SlowRule()
    for step in range(200):
        rule.add("a", Sample(1, 0.01, 0, 0, 0))
        assert rule.add("b", Sample(1, 2.0 if step % 25 == 0 else 0.01, 0, 0, 0)) is None
    assert feed(SlowRule(), 100, 2.0, examples=2.0) == []
    rule = SlowRule()
    for _ in range(100):
        rule.add("a", Sample(1, 0.0002, 0, 0, 0))
        assert rule.add("b", Sample(1, 0.0008, 0, 0, 0)) is None


def test_more_work_than_cores_is_another_sentence_once() -> None:
    """Time in a queue for a core makes no task slow; what it computes too long besides does."""
    rule, found = SlowRule(), []
    for step in range(400):
        late = step // 100 % 2  # each in turn
        for task in range(2):
            own, queue = (0.03, 0.02) if task == late else (0.01, 0.0)
            found += [rule.add(f"replica {task}", Sample(1, own, 0, 0, 0, queue=queue))]
    told = [str(each) for each in found if each is not None]
    assert len(told) == 1 and told[0].startswith("this machine has more work than cores: replica 0")
    assert feed(SlowRule(), 100, 2.5, queue=0.005) == [STEPS]


def test_a_line_that_lacks_a_number_is_refused() -> None:
    line = {"steps": 3, "compute": 0.1, "load": 0, "link": 0, "wait": 0.0, "examples": 4}
    assert Sample.from_json(line).own == pytest.approx(0.1)
    for name in line:
        with pytest.raises(ValueError, match="lacks"):
            Sample.from_json({**line, name: "many"})
