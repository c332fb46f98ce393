"""What a custom loop remembers besides model and optimizer (`loader.remember`): its state."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable, UsageError
from stratagem.wire.tree import decode, encode


def plain_state(name: str, state: Any) -> Any:
    """A copy of a state that can be saved and sent: plain kinds, numbers as keys included."""
    try:
        return decode(encode(state))
    except NotDistributable as problem:
        raise NotDistributable(
            f"loader.remember({name}=...): what its state_dict returns cannot be saved: {problem}"
        ) from None


def read_state(state: Any) -> Any:
    """A state from this chief's own file; older ones have it as the bytes of a file of torch."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8:
        return state
    data = state.numpy().tobytes()
    if not data.startswith(b"PK\x03\x04"):
        return state
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def state_of(thing: Any) -> Any:
    """What goes on of something that a loop remembers."""
    return thing if isinstance(thing, list | dict) else thing.state_dict()


def refuse_forgotten(optimizer: Any, things: dict[str, Any]) -> None:
    """Refuse a schedule that would be stepped twice for a batch that is taken again."""
    known = any(getattr(thing, "optimizer", None) is optimizer for thing in things.values())
    if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not known:
        raise UsageError(
            "the optimizer has a scheduler, which begins anew when a replica dies, unless it is "
            "remembered: loader.remember(schedule=schedule) before loader.epochs(n)."
        )
