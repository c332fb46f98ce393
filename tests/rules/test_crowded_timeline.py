"""Schedules of processes that share fewer processors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.rules.crowded_timeline import crowded_timeline
from stratagem.rules.schedules import SCHEDULES, Op, gpipe
from stratagem.rules.timeline import HandOver, timeline
from tests.rules.test_timeline import PARTS, cases

Case = tuple[str, int, int, dict[Op, float], dict[Op, HandOver]]


@given(cases())
def test_where_nobody_keeps_others_up_it_is_the_plain_time_line(case: Case) -> None:
    name, devices, count, seconds, links = case
    given = (SCHEDULES[name], devices, count, PARTS[name])
    plain = timeline(*given, seconds.__getitem__, links.__getitem__)
    assert crowded_timeline(*given, lambda op, k: seconds[op], links.__getitem__) == plain


@given(cases())
def test_on_one_processor_it_takes_what_all_operations_take(case: Case) -> None:
    """Somebody can always go on, where messages take no time."""
    name, devices, count, seconds, _ = case
    given = (SCHEDULES[name], devices, count, PARTS[name])
    line = crowded_timeline(*given, lambda op, k: seconds[op] * k)
    assert line.seconds == pytest.approx(sum(seconds.values()))
    assert {span.op for span in line.spans} == seconds.keys() and len(line.spans) == len(seconds)


@given(cases(), st.floats(1.0, 4.0))
def test_it_lies_between_all_alone_and_all_kept_up(case: Case, slower: float) -> None:
    """One device, or one microbatch: nobody computes beside another."""
    name, devices, count, seconds, _ = case
    given = (SCHEDULES[name], devices, count, PARTS[name])

    def among(op: Op, k: int) -> float:
        return seconds[op] * (slower if k > 1 else 1.0)

    found = crowded_timeline(*given, among).seconds
    alone = timeline(*given, seconds.__getitem__).seconds
    assert alone - 1e-9 <= found <= alone * slower + 1e-9
    if count == 1 or devices == 1:
        assert found == pytest.approx(alone)


def test_what_is_left_goes_on_at_another_speed() -> None:
    """Two stages; F of 1 second, twice as long while both compute. F1 on device 0 and F0 on device
    1 begin at 1 and end at 3; then the second microbatch is alone on device 1."""
    line = crowded_timeline(gpipe, 2, 2, 1, lambda op, k: (1.0 if op.kind == "F" else 4.0) * k)
    begin = {span.op: (span.begin, span.end) for span in line.spans}
    assert begin[Op("F", 0, 1)] == begin[Op("F", 1, 0)] == (1.0, 3.0)
    assert begin[Op("F", 1, 1)] == (3.0, 4.0) and begin[Op("B", 1, 0)] == (4.0, 8.0)
    # B0 of device 0 has B1 of device 1 beside it, and both take twice as long
    assert begin[Op("B", 0, 0)] == begin[Op("B", 1, 1)] == (8.0, 16.0)
    assert line.seconds == 20.0
