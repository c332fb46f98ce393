"""Codecs and reducers: what is rounded, what is not, and in which order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.codecs.codec import CastCodec, Codec, codec_for, wire_type
from stratagem.codecs.reducer import Encoded, Plain
from stratagem.codecs.wire_choice import reducer
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
    made = Encoded(Alone(), CastCodec(torch.bfloat16))
    flat = made.buffer(len(values), torch.float32, torch.device("cpu"))
    flat.copy_(torch.tensor(values))
    made.reduce(flat, 1.0).wait()
    assert torch.equal(flat, torch.tensor(values).bfloat16().float())


@given(
    floats,
    st.sampled_from([None, "float32", "bfloat16", "float16"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(-4, 4, width=16),
)
def test_codecs(values: list[float], wire: str | None, dtype: torch.dtype, factor: float) -> None:
    """Decoding returns the numbers rounded once, or adds them; sizes are as declared."""
    codec: Codec = codec_for(wire, dtype)
    flat = torch.tensor(values, dtype=dtype)
    encoded = codec.encode(flat)
    assert encoded.nbytes == codec.itemsize * len(values)
    assert encoded.data_ptr() != flat.data_ptr()
    room = codec.room([len(values)])
    assert codec.encode(flat, room) is room and torch.equal(room, encoded)
    out, rounded = torch.empty_like(flat), flat.to(wire_type(wire) or dtype).to(dtype)
    codec.decode(encoded, out)
    assert torch.equal(out, rounded)
    assert codec.lossy or torch.equal(out, flat)
    total = torch.ones_like(flat)
    codec.decode_add(encoded, total, factor)
    assert torch.allclose(total, 1 + factor * rounded, rtol=1e-6, atol=1e-6)
    codec.encode(out, encoded)  # rounding twice changes nothing
    codec.decode(encoded, out)
    assert torch.equal(out, rounded)


KINDS = [Plain(Alone()), Encoded(Alone(), CastCodec(torch.bfloat16))]


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "cast"])
def test_a_weight_of_zero_erases_nan(kind: Plain | Encoded) -> None:
    flat = kind.buffer(3, torch.float32, torch.device("cpu"))
    flat.fill_(float("nan"))
    kind.reduce(flat, 0.0).wait()
    assert torch.equal(flat, torch.zeros(3))


def test_names() -> None:
    assert wire_type(None) is None and wire_type("bfloat16") is torch.bfloat16
    assert not reducer(Alone(), "float32").lossy and reducer(Alone(), "float16").lossy
    with pytest.raises(UsageError, match="bfloat16"):
        wire_type("int4")
