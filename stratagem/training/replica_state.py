"""What each replica has of its own, in a checkpoint: random numbers and running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.data.streams import generator_states, set_beside_torch
from stratagem.errors import NotDistributable, UsageError
from stratagem.training.replica import Replica
from stratagem.wire.tree import decode, encode


def own_state(replica: Replica, buffers: Sequence[Tensor]) -> dict[str, Any]:
    """Copy this replica's own state; a lone replica's buffers are in the checkpoint already."""
    copies = [b.detach().cpu().clone() for b in buffers] if replica.count > 1 else []
    return {"random": generator_states(replica.device), "buffers": copies}


def own_of(saved: Sequence[Any], replica: Replica) -> Any:
    """Return this replica's state among those of all; None if the number of replicas has changed,
    except for the chief, which orders the data."""
    if len(saved) == replica.count or (replica.is_chief and saved):
        return saved[replica.index]
    return None


def set_random(replica: Replica, random: dict[str, Any] | None) -> None:
    """Restore this replica's random numbers; None leaves them."""
    if random is None:
        return
    if replica.streams is not None:
        replica.streams.go_on(model=random["torch"])
    else:
        torch.set_rng_state(random["torch"])
    set_beside_torch(random, replica.device)


@torch.no_grad()
def take_buffers(mine: list[Tensor], saved: Sequence[list[Tensor]], replica: Replica) -> None:
    """Restore each replica's running statistics; with another number of replicas, their mean."""
    if not saved[0]:
        return  # saved on one device, whose buffers all replicas have
    if len(saved) == replica.count:
        for buffer, value in zip(mine, saved[replica.index], strict=True):
            buffer.copy_(value)
        return
    for buffer, values in zip(mine, zip(*saved, strict=True), strict=True):
        if buffer.is_floating_point():
            buffer.copy_(torch.stack([value.double() for value in values]).mean(0))


def plain_state(name: str, state: Any) -> Any:
    """Copy a state, or refuse one that is not of plain types, which can be saved and sent."""
    try:
        return decode(encode(state))
    except NotDistributable as problem:
        raise NotDistributable(
            f"loader.remember({name}=...): what its state_dict returns cannot be saved: {problem}"
        ) from None


def state_of(thing: Any) -> Any:
    """Return the state of an object that was given to `loader.remember`."""
    return thing if isinstance(thing, list | dict) else thing.state_dict()


def refuse_forgotten(optimizer: Any, besides: Sequence[Any], things: dict[str, Any]) -> None:
    """Refuse schedulers and models that a resumed loop would begin anew.

    `besides`: the models that were prepared without a loader, and their optimizers.
    """
    held = [
        part for each in things.values() for part in (each, *getattr(each, "__dict__", {}).values())
    ]
    known = any(getattr(part, "optimizer", None) is optimizer for part in held)
    if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not known:
        raise UsageError(
            "the optimizer has a scheduler, which begins anew when the loop goes on, unless it is "
            "remembered: loader.remember(schedule=schedule) before loader.epochs(n)."
        )
    if any(all(part is not each for part in held) for each in besides):
        raise UsageError(
            "a model was prepared without a loader, and begins anew when the loop goes on, unless "
            "it and its optimizer are remembered: loader.remember(critic=critic, "
            "critic_optimizer=critic_optimizer) before loader.epochs(n)."
        )
