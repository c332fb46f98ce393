"""The number of chunks: all candidates are tried, the fastest is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratagem.rules.chunk_choice import ChunkChoice, Chunks


def test_a_number_that_is_given_stays() -> None:
    choice = ChunkChoice(2, 8)
    found = []
    for length in (3, 20, 8, 0):
        found.append(choice.begin(length).number)
        choice.took(1.0)
    assert found == [3, 8, 8, 1]


@given(
    st.integers(1, 5), st.integers(1, 60), st.dictionaries(st.integers(1, 40), st.floats(0.1, 9))
)
def test_all_are_tried_twice_and_the_fastest_stays(
    devices: int, length: int, cost: dict[int, float]
) -> None:
    choice, seen = ChunkChoice(devices), list[int]()
    for step in range(30):
        count, by_rows = choice.begin(length, 9)
        assert not by_rows
        assert 1 <= count <= length
        seen.append(count)
        # the very first batch is slow for other reasons
        choice.took(100.0 if not step else cost.get(count, 5.0))
    wanted = [n * devices for n in (1, 2, 4, 8) if n * devices <= length] or [length]
    assert set(seen) == set(wanted) and all(seen.count(n) >= 2 for n in wanted)
    times = {n: cost.get(n, 5.0) for n in wanted}
    assert times[seen[-1]] == min(times.values())
    assert len(set(seen[1 + 2 * len(wanted) :])) == 1


def test_a_last_batch_of_another_length_is_not_counted() -> None:
    choice = ChunkChoice(2)
    for length in [32, *[16, 32] * 8]:
        count = choice.begin(length).number
        # on short sequences everything is fast
        choice.took(0.01 * count if length == 16 else 1 / count)
    assert choice.begin(32).number == 16 and choice.begin(3).number == 3


@given(st.integers(2, 4), st.integers(1, 40), st.integers(1, 20), st.booleans())
def test_pieces_by_rows_are_tried_as_well(
    devices: int, length: int, rows: int, better: bool
) -> None:
    choice, seen = ChunkChoice(devices, rows=True), list[Chunks]()
    for _ in range(30):
        seen.append(choice.begin(length, rows))
        assert 1 <= seen[-1].number <= (rows if seen[-1].by_rows else length)
        choice.took(1.0 if seen[-1].by_rows is better else 2.0)
    by_rows = {n * devices for n in (1, 2, 4)} & set(range(rows + 1))
    assert {c.number for c in seen if c.by_rows} == by_rows
    if by_rows and length >= devices:
        assert seen[-1].by_rows is better
        assert choice.begin(length, 1) == (Chunks(1, True) if better else seen[-1])
