"""The time line of a schedule: real orders, any times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.rules.schedules import SCHEDULES, Op, bubble, gpipe, one_f_one_b, waves
from stratagem.rules.timeline import HandOver, Timeline, draw, timeline
from tests.rules.schedule_rows import run

PARTS = {"gpipe": 1, "1f1b": 1, "eager": 1, "interleaved": 2}
Case = tuple[str, int, int, dict[Op, float], dict[Op, HandOver]]
times = st.floats(0.01, 5.0)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 9))
def test_equal_times_are_the_steps_of_the_schedule(name: str, devices: int, count: int) -> None:
    parts = PARTS[name]
    line = timeline(SCHEDULES[name], devices, count, parts, lambda op, k: 1.0)
    assert line.seconds == len(run(SCHEDULES[name], devices, count, parts)[0])
    if count % devices == 0 or parts == 1:
        assert line.bubble == pytest.approx(bubble(devices, count, parts))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    devices, count = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    ops = [op for d in range(devices) for op in SCHEDULES[name](d, devices, count, PARTS[name])]
    seconds = {op: draw(times) for op in ops}
    return name, devices, count, seconds, {op: HandOver(draw(times), draw(times)) for op in ops}


def made(case: Case, slow: float) -> Timeline:
    name, devices, count, seconds, links = case

    def over(op: Op) -> HandOver:
        return HandOver(slow * links[op].busy, slow * links[op].late)

    return timeline(SCHEDULES[name], devices, count, PARTS[name], lambda op, k: seconds[op], over)


@given(cases())
def test_nothing_begins_before_what_it_needs(
    case: Case,
) -> None:
    name, devices, _, seconds, links = case
    line = made(case, 1.0)
    end = {span.op: span.end for span in line.spans}
    assert end.keys() == seconds.keys() and len(line.spans) == len(end)
    last = devices * PARTS[name] - 1
    for span in line.spans:
        kind, part, m = span.op
        before = Op(kind, part - 1 if kind == "F" else part + 1, m)
        if 0 <= before.part <= last:
            way = 0.0 if devices == 1 else links[before].busy + links[before].late
            assert span.begin >= end[before] + way - 1e-9
        assert kind == "F" or span.begin >= end[Op("F", part, m)]
        assert span.end - span.begin == pytest.approx(seconds[span.op])
    for device in range(devices):
        own = [span for span in line.spans if span.device == device]
        assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(own))


@given(cases(), st.floats(1.0, 9.0))
def test_a_slower_link_is_never_faster(case: Case, slow: float) -> None:
    assert made(case, slow).seconds >= made(case, 1.0).seconds - 1e-9
    assert made(case, 0.0).seconds >= max(made(case, 0.0).busy) - 1e-9


def test_messages_on_a_link_go_one_behind_the_other() -> None:
    """Forward takes 1, a message 3: the second one waits for the first, and latency does not."""
    line = timeline(gpipe, 2, 2, 1, lambda op, k: 1.0, lambda op: HandOver(3.0, 0.5))
    begin = {span.op: span.begin for span in line.spans}
    assert begin[Op("F", 1, 0)] == 4.5 and begin[Op("F", 1, 1)] == 7.5


def test_a_long_backward_is_drawn_longer() -> None:
    line = timeline(one_f_one_b, 2, 3, 1, lambda op, k: 2.0 if op.kind == "B" else 1.0)
    assert draw(line, 36).splitlines() == [
        "device 0  F0-F1-......B0====F2-B1====...B2====",
        "device 1  ...F0-B0====F1-B1====F2-B2====......",
    ]
    assert line.seconds == 12.0 and line.bubble == 0.25 and line.busy == (9.0, 9.0)


def test_waves_go_there_and_back() -> None:
    line = timeline(waves, 3, 4, 1, lambda op, k: 1.0)
    assert line.seconds == 2 * (4 + 3 - 1)


def test_a_schedule_that_stops_says_so() -> None:
    with pytest.raises(RuntimeError, match="nobody can go on"):
        timeline(lambda d, *_: iter([Op("B", d, 0)]), 2, 1, 1, lambda op, k: 1.0)


@given(cases())
def test_on_one_processor_it_takes_what_all_operations_take(case: Case) -> None:
    """Where messages take no time, some device can always go on."""
    name, devices, count, seconds, _ = case
    given = (SCHEDULES[name], devices, count, PARTS[name])
    line = timeline(*given, lambda op, k: seconds[op] * k)
    assert line.seconds == pytest.approx(sum(seconds.values()))
    assert {span.op for span in line.spans} == seconds.keys() and len(line.spans) == len(seconds)


@given(cases(), st.floats(1.0, 4.0))
def test_it_lies_between_all_alone_and_all_kept_up(case: Case, slower: float) -> None:
    """With one device or one microbatch no two devices compute at the same time."""
    name, devices, count, seconds, _ = case
    given = (SCHEDULES[name], devices, count, PARTS[name])

    def among(op: Op, k: int) -> float:
        return seconds[op] * (slower if k > 1 else 1.0)

    found = timeline(*given, among).seconds
    alone = timeline(*given, lambda op, k: seconds[op]).seconds
    assert alone - 1e-9 <= found <= alone * slower + 1e-9
    if count == 1 or devices == 1:
        assert found == pytest.approx(alone)


def test_what_is_left_goes_on_at_another_speed() -> None:
    """Two stages; F of 1 second, twice as long while both compute. F1 on device 0 and F0 on device
    1 begin at 1 and end at 3; then the second microbatch is alone on device 1."""
    line = timeline(gpipe, 2, 2, 1, lambda op, k: (1.0 if op.kind == "F" else 4.0) * k)
    begin = {span.op: (span.begin, span.end) for span in line.spans}
    assert begin[Op("F", 0, 1)] == begin[Op("F", 1, 0)] == (1.0, 3.0)
    assert begin[Op("F", 1, 1)] == (3.0, 4.0) and begin[Op("B", 1, 0)] == (4.0, 8.0)
    # B0 of device 0 has B1 of device 1 beside it, and both take twice as long
    assert begin[Op("B", 0, 0)] == begin[Op("B", 1, 1)] == (8.0, 16.0)
    assert line.seconds == 20.0
