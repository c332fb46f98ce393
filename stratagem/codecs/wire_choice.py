"""The reducer and the codec that `wire=` selects."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stratagem.codecs.codec import CastCodec, wire_type
from stratagem.codecs.compression import Compression
from stratagem.codecs.int8 import Int8
from stratagem.codecs.low_rank import LowRank, PowerSGD
from stratagem.codecs.reducer import Encoded, Plain, Reducer
from stratagem.codecs.sign import Sign
from stratagem.codecs.topk import TopK
from stratagem.codecs.two_sided import LargestFirst, TwoSided
from stratagem.errors import UsageError
from stratagem.wire.collective import Collective

#: the type of `wire=`
Wire = str | Compression | None


def check_wire(wire: Wire) -> None:
    """Raise UsageError if an all-reduce has no such wire."""
    if not isinstance(wire, Compression):
        wire_type(wire)


def reducer(collective: Collective, wire: Wire) -> Reducer:
    """Return the reducer whose gradients travel as `wire`."""
    if isinstance(wire, TopK):
        return LargestFirst(collective, wire)
    if isinstance(wire, Int8 | Sign):
        return TwoSided(collective, wire, wire)
    if isinstance(wire, PowerSGD):
        return LowRank(collective, wire)
    if isinstance(wire, Compression):
        raise UsageError(f"wire={wire!r} has no reducer; use one of stratagem's records.")
    dtype = wire_type(wire)
    return Plain(collective) if dtype is None else Encoded(collective, CastCodec(dtype))


#: compressions by name
RECORDS: dict[str, type[Compression]] = {
    kind.__name__: kind for kind in (Int8, TopK, Sign, PowerSGD)
}


def wire_to_json(wire: Wire) -> Any:
    """Return `wire` as JSON for the servers: a type's name, or a record's name and its fields."""
    return [type(wire).__name__, asdict(wire)] if isinstance(wire, Compression) else wire


def wire_from_json(told: Any) -> Wire:
    """Return the `wire` that `wire_to_json` wrote; a record checks its fields."""
    if told is None or isinstance(told, str):
        return told
    name, given = told
    if name not in RECORDS:
        raise UsageError(f"wire={name!r:.40} is not known; install the same stratagem everywhere.")
    return RECORDS[name](**given)
