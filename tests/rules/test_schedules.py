"""Schedules of pipelines: every microbatch once forward and once backward through every part."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.rules import schedules
from stratagem.rules.schedules import SCHEDULES, Op, bubble, eager, gpipe, interleaved, kept
from stratagem.rules.schedules import one_f_one_b as alternating
from stratagem.rules.timeline import HandOver, timeline
from tests.rules.schedule_rows import draw, run

pytestmark = pytest.mark.timeout(60)
names = st.sampled_from(sorted(SCHEDULES))
sizes = st.integers(1, 6)
batches = st.integers(1, 17)


def _parts(name: str, parts: int) -> int:
    return parts if name == "interleaved" else 1


@given(names, sizes, batches, st.integers(1, 3))
def test_every_microbatch_goes_forward_and_then_backward_once(
    name: str, devices: int, microbatches: int, parts: int
) -> None:
    parts = _parts(name, parts)
    for device in range(devices):
        ops = list(SCHEDULES[name](device, devices, microbatches, parts))
        own = range(device, devices * parts, devices)
        wanted = {Op(k, p, m) for k in ("F", "B") for p in own for m in range(microbatches)}
        assert len(ops) == len(wanted) and set(ops) == wanted
        for part in own:
            for kind in ("F", "B"):  # channels are first in, first out
                order = [op.microbatch for op in ops if op[:2] == (kind, part)]
                assert order == sorted(order)
            for m in range(microbatches):
                assert ops.index(Op("F", part, m)) < ops.index(Op("B", part, m))


@given(names, sizes, batches, st.integers(1, 3), st.integers(1, 4))
def test_nobody_waits_for_ever(
    name: str, devices: int, microbatches: int, parts: int, slots: int
) -> None:
    """Over channels of limited and of unlimited size."""
    parts = _parts(name, parts)
    if name == "interleaved" and parts > 1:
        slots += devices * parts  # what the strategy gives them
    for limit in (slots, None):
        rows = run(SCHEDULES[name], devices, microbatches, parts, limit)
        done = [op for row in rows for op in row if op is not None]
        assert len(done) == 2 * devices * parts * microbatches


@given(sizes, batches)
def test_microbatches_that_are_kept(devices: int, microbatches: int) -> None:
    for device in range(devices):
        assert kept(gpipe(device, devices, microbatches)) == microbatches
        bound = min(microbatches, devices - device)
        assert kept(alternating(device, devices, microbatches)) == bound
        assert kept(eager(device, devices, microbatches)) <= 2 * (devices - device) - 1


@given(sizes, batches)
def test_the_bubble_is_that_of_the_formula(devices: int, microbatches: int) -> None:
    for schedule in (gpipe, alternating, eager):
        rows = run(schedule, devices, microbatches)
        idle = sum(op is None for op in rows[0]) / len(rows[0])
        assert idle == pytest.approx(bubble(devices, microbatches))


@given(st.integers(2, 4), batches, st.floats(0.5, 2), st.floats(0.0, 0.75))
def test_who_runs_ahead_waits_for_no_message(
    devices: int, microbatches: int, backward: float, late: float
) -> None:
    """With 1F1B every microbatch costs a latency; here only the first on its way does, and the last
    on its way back."""

    def whole(schedule: schedules.Schedule) -> float:
        takes = {"F": 1.0, "B": backward}
        shape = (devices, microbatches, 1)
        ops = (lambda op, k: takes[op.kind], lambda op: HandOver(0.0, late))
        return timeline(schedule, *shape, *ops).seconds

    least = (microbatches + devices - 1) * (1 + backward) + 2 * (devices - 1) * late
    assert whole(eager) <= min(least, whole(alternating)) + 1e-9


@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3))
def test_interleaving_shortens_the_bubble(devices: int, groups: int, parts: int) -> None:
    microbatches = devices * groups
    rows = run(interleaved, devices, microbatches, parts)
    idle = sum(op is None for op in rows[0]) / len(rows[0])
    assert idle < bubble(devices, microbatches)


@given(sizes, batches, st.integers(1, 4))
def test_waves_of_chunks_go_to_the_end_and_back(devices: int, chunks: int, slots: int) -> None:
    """A chunk of time follows the one before it, and backward the one behind it."""
    for device in range(devices):
        ops = list(schedules.waves(device, devices, chunks))
        there, back = ops[:chunks], ops[chunks:]
        assert [op[::2] for op in there] == [("F", k) for k in range(chunks)]
        assert [op[::2] for op in back] == [("B", k) for k in reversed(range(chunks))]
    run(schedules.waves, devices, chunks, slots=slots)
    rows = run(schedules.waves, devices, chunks)
    assert len(rows[0]) == 2 * (chunks + devices - 1)  # each wave S K / (K + S - 1) times as fast


def test_a_channel_that_is_too_narrow_is_seen() -> None:
    """The check itself can fail: here a device waits for a later result."""

    def backward_first(device: int, devices: int, microbatches: int, parts: int = 1):  # type: ignore[no-untyped-def]
        return reversed(list(gpipe(device, devices, microbatches, parts)))

    with pytest.raises(RuntimeError, match="nobody can go on"):
        run(backward_first, 2, 2)


def test_drawings() -> None:
    doc = schedules.__doc__ or ""
    page = (Path(__file__).parents[2] / "docs" / "model-parallel.md").read_text()
    for schedule in (gpipe, alternating, eager):
        for line in draw(schedule, 3, 4).splitlines():
            assert line in doc and line in page
    assert draw(interleaved, 2, 4, 2) in page and draw(schedules.waves, 3, 4) in page
