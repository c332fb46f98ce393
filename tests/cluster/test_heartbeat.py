"""The arithmetic of heartbeats and of waiting, with a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster import waiting
from stratagem.cluster.heartbeat import BEAT, REMIND, Heartbeats, Silence
from stratagem.cluster.parsing import listing
from stratagem.cluster.waiting import Wait


def test_a_silence_is_named_once_then_reminded_of_then_over() -> None:
    heartbeat = Heartbeats([1, 2], now=0.0, give_up=30.0)
    spoken: list[Silence] = []
    for tick in range(1, 61):
        heartbeat.heard(2, tick / 2)
        spoken += heartbeat.check(tick / 2)
    assert spoken == [
        Silence(1, 2.5, over=False),
        Silence(1, 2.5 + REMIND, over=False),
        Silence(1, 2.5 + 2 * REMIND, over=False),
        Silence(1, 30.0, over=True),
    ]


def test_only_a_silence_that_was_named_ends_aloud() -> None:
    heartbeat = Heartbeats([1], now=0.0)
    assert heartbeat.heard(1, 2.0) is None
    assert [heartbeat.check(now / 2) for now in range(1, 12)] == [[]] * 8 + [
        [Silence(1, 2.5, over=False)],
        [],
        [],
    ]
    assert heartbeat.heard(1, 7.0) == 5.0
    assert heartbeat.heard(1, 8.0) is None


@given(st.floats(0, BEAT), st.floats(0, BEAT))
def test_a_cut_is_named_within_three_seconds(before: float, look: float) -> None:
    """For every time of the last beat `before` the cut and of the first check after it."""
    heartbeat = Heartbeats([1], now=-before)
    named = next(tick for tick in range(20) if heartbeat.check(look + tick * BEAT))
    assert 1.5 < look + named * BEAT < 3.0


def test_the_forgotten_are_not_missed() -> None:
    heartbeat = Heartbeats([1], now=0.0)
    assert [heartbeat.check(float(now)) for now in range(1, 4)][-1]
    heartbeat.forget(1)
    assert heartbeat.check(4.0) == []
    assert heartbeat.heard(1, 101.0) is None


@given(slept=st.floats(1.6, 1e6), before=st.floats(0, 2.9))
def test_who_slept_blames_nobody(slept: float, before: float) -> None:
    heartbeat = Heartbeats([1, 2], now=0.0)
    for tick in range(int(before) + 1):
        assert heartbeat.check(float(tick)) == []
    woken = int(before) + slept
    assert heartbeat.check(woken) == [] and heartbeat.overslept == woken - int(before)
    # A silence that goes on afterwards is named.
    later = [silence for tick in range(1, 5) for silence in heartbeat.check(woken + tick)]
    assert {silence.rank for silence in later} == {1, 2}


def test_patience_speaks_at_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    wait = Wait(40.0, first=[2.0, 5.0])
    spoken = []
    for tick in range(1, 100):
        now[0] = 100.0 + tick / 2
        if wait.due():
            spoken.append(wait.waited)
        if wait.over:
            break
    assert spoken == [2.0, 5.0, 15.0, 25.0, 35.0]
    assert wait.waited == 40.0 and wait.left == 0.0


def test_a_list_for_a_sentence() -> None:
    assert listing(["a"]) == "a"
    assert listing(["a", "b"]) == "a and b"
    assert listing(["a", "b", "c"]) == "a, b and c"
    assert listing([str(n) for n in range(10)], most=3) == "0, 1, 2 and 7 more"
