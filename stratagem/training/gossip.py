"""Replicas that mix their weights with those of their neighbours (`sync=sg.Gossip()`)."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.rules.cadence import Gossip
from stratagem.state.outer import OuterPart
from stratagem.wire.collective import Collective


def mix(parts: Sequence[OuterPart], collective: Collective, gossip: Gossip, turn: int) -> None:
    """Mix the weights with those of the neighbours. Collective."""
    rank, size = collective.rank, collective.size
    weights = gossip.weights(rank, size, turn)
    receivers = gossip.receivers(rank, size, turn)
    senders = [other for other in weights if other != rank]
    for part in parts:
        mixed = part.read()
        received = collective.trade(mixed, receivers, senders)
        mixed.mul_(weights[rank])
        for other, values in zip(senders, received, strict=True):
            mixed.add_(values, alpha=weights[other])
        part.write(mixed)


def take_neighbours(
    parts: Sequence[OuterPart], collective: Collective, here: Sequence[bool]
) -> None:
    """Whoever is new takes the weights of the one before it that is not. Collective."""
    source = {
        rank: max(other for other in range(rank) if here[other])
        for rank, was_here in enumerate(here)
        if not was_here
    }
    if not source:
        return
    receivers = [rank for rank, other in source.items() if other == collective.rank]
    senders = [source[collective.rank]] if collective.rank in source else []
    for part in parts:
        for values in collective.trade(part.read(), receivers, senders):
            part.write(values)
