"""Amounts of GPU memory as people write them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.training.devices import explain_out_of_memory, fraction

TOTAL = 80 * 2**30


@pytest.mark.parametrize(
    ("text", "part"),
    [("50%", 0.5), ("0.5", 0.5), ("8GiB", 0.1), ("8 gib", 0.1), ("40000MB", 4e10 / TOTAL)],
)
def test_spellings(text: str, part: float) -> None:
    assert fraction(text, TOTAL) == pytest.approx(part)


@given(st.text(max_size=12))
def test_anything_else_is_refused_in_a_sentence(text: str) -> None:
    try:
        assert 0 < fraction(text, TOTAL) <= 1
    except UsageError as error:
        assert "GPU_MEMORY" in str(error)


@pytest.mark.parametrize("text", ["0", "101%", "200GiB", "-1", "8 bananas"])
def test_impossible_amounts(text: str) -> None:
    with pytest.raises(UsageError, match="GPU_MEMORY"):
        fraction(text, TOTAL)


def test_who_runs_out_of_it_is_told_what_divides_the_model() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, explain_out_of_memory(["cuda:0"]):
        raise torch.OutOfMemoryError
    (note,) = caught.value.__notes__
    assert "on cuda:0" in note and "ShardedStrategy()" in note and "PipelineStrategy()" in note
