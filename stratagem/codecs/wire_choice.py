"""Which reducer and which codec stand behind `wire=`."""

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

#: what `wire=` may be
Wire = str | Compression | None


def check_wire(wire: Wire) -> None:
    """Refuse what is no wire of an all-reduce."""
    if not isinstance(wire, Compression):
        wire_type(wire)


def reducer(collective: Collective, wire: Wire) -> Reducer:
    """The reducer whose gradients travel as `wire`."""
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


#: by their names
RECORDS: dict[str, type[Compression]] = {
    kind.__name__: kind for kind in (Int8, TopK, Sign, PowerSGD)
}


def wire_to_json(wire: Wire) -> Any:
    """`wire` as the servers are told it: a name, or a record's own name and what it was given."""
    return [type(wire).__name__, asdict(wire)] if isinstance(wire, Compression) else wire


def wire_from_json(told: Any) -> Wire:
    """What `wire_to_json` has written; a record checks what it is given."""
    if told is None or isinstance(told, str):
        return told
    name, given = told
    if name not in RECORDS:
        raise UsageError(f"wire={name!r:.40} is not known; install the same stratagem everywhere.")
    return RECORDS[name](**given)
