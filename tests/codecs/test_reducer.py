"""Reducers: what is rounded, what is not, and in which order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.codecs.reducer import Cast, Plain, reducer, wire_type
from stratagem.errors import UsageError
from stratagem.wire.collective import Alone

floats = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50)


@given(floats, st.sampled_from([0.0, 0.5, 1.0]))
def test_plain_keeps_every_bit(values: list[float], weight: float) -> None:
    made = Plain(Alone())
    flat = made.buffer(len(values), torch.float32, torch.device("cpu"))
    flat.copy_(torch.tensor(values))
    made.reduce(flat, weight).wait()
    assert torch.equal(flat, torch.tensor(values) * weight)


@given(floats)
def test_cast_rounds_once(values: list[float]) -> None:
    made = Cast(Alone(), torch.bfloat16)
    flat = made.buffer(len(values), torch.float32, torch.device("cpu"))
    flat.copy_(torch.tensor(values))
    made.reduce(flat, 1.0).wait()
    assert torch.equal(flat, torch.tensor(values).bfloat16().float())


KINDS = [Plain(Alone()), Cast(Alone(), torch.bfloat16)]


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "cast"])
def test_a_weight_of_zero_erases_nan(kind: Plain | Cast) -> None:
    flat = kind.buffer(3, torch.float32, torch.device("cpu"))
    flat.fill_(float("nan"))
    kind.reduce(flat, 0.0).wait()
    assert torch.equal(flat, torch.zeros(3))


def test_names() -> None:
    assert wire_type(None) is None and wire_type("bfloat16") is torch.bfloat16
    assert not reducer(Alone(), "float32").lossy and reducer(Alone(), "float16").lossy
    with pytest.raises(UsageError, match="bfloat16"):
        wire_type("int4")
