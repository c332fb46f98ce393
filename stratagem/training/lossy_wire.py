"""What a wire that leaves something out can go with, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.codecs.compression import Compression
from stratagem.codecs.reducer import Reducer
from stratagem.codecs.topk import TopK
from stratagem.errors import NotDistributable
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings

log = logging.getLogger("stratagem")

#: wires of which this process has spoken
_said: set[Compression] = set()


def check_optimizer(settings: Settings, optimizer: Any, replica: Replica) -> None:
    """Refuse an optimizer that such a wire leads astray, and say what is no longer exact."""
    wire = settings.wire
    if not isinstance(wire, Compression):
        return
    momentum = wire.momentum if isinstance(wire, TopK) else 0.0
    if momentum and replica.count == 1:
        raise NotDistributable(
            f"wire={wire!r} keeps the momentum of several replicas, and there is one, which sends "
            "nothing; leave wire out, and give the momentum to the optimizer."
        )
    if replica.count == 1:
        return
    if momentum and any(_momenta(optimizer)):
        raise NotDistributable(
            f"wire={wire!r} keeps the momentum, and the optimizer has one of its own, so that "
            "gradients would be added up twice; use SGD without momentum."
        )
    if wire.only_linear and not _is_linear(optimizer):
        raise NotDistributable(
            f"{type(optimizer).__name__} divides by the size of the gradients that it is given, "
            f"and wire={wire!r} gives it few or coarse ones; use SGD, or sg.Int8()."
        )
    if replica.leads and wire not in _said:
        _said.add(wire)
        log.warning(
            "wire=%r: replicas send less than their gradients, and what is left out later; weights "
            "are alike on all replicas, but no longer those of one device",
            wire,
        )


def refuse_half(settings: Settings) -> None:
    """Refuse gradients that a scaler multiplies by another number now and then."""
    if isinstance(settings.wire, Compression):
        raise NotDistributable(
            f'precision="float16" scales gradients by a number that changes, and wire='
            f"{settings.wire!r} keeps some of them for later steps; use precision="
            '"bfloat16".'
        )


def _momenta(optimizer: Any) -> list[float]:
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        return [float(group.get("momentum", 0.0)) for group in groups]
    return [float(getattr(optimizer, "momentum", 0.0) or 0.0)]


def _is_linear(optimizer: Any) -> bool:
    """Whether its step is a sum of gradients: SGD of torch, or of Keras."""
    return any(base.__name__ == "SGD" for base in type(optimizer).__mro__)


def load_residuals(reducer: Reducer | None, states: Sequence[Mapping[str, Any]]) -> None:
    """Go on with what the replicas' wires had kept when they were saved; say if nobody can."""
    kept = [state for state in states if state]
    if not kept:
        return
    made = str(kept[0].get("wire"))
    if reducer is not None and repr(getattr(reducer, "record", None)) == made:
        reducer.load(kept)
        return
    log.warning(
        "the checkpoint was made with wire=%s, which had kept parts of gradients for later; this "
        "training has another wire, or one replica, and goes on without them.",
        made,
    )
