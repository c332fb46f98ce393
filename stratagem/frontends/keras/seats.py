"""Where followers sit: each keeps a player for every model that it was sent."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

from stratagem.frontends.keras import environment, parcel
from stratagem.frontends.keras.player import Player
from stratagem.replicas import follower
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings

_numbers = itertools.count()
#: numbers of models that are gone here, for followers to forget
_gone: list[int] = []


def number_of(model: Any) -> int:
    """A number for a new model; followers forget it when the model is gone."""
    number = next(_numbers)
    weakref.finalize(model, _gone.append, number)
    return number


@dataclass
class Seat:
    """What a follower needs to play; `model` is None when it has it from an earlier call."""

    number: int
    model: Any
    settings: Settings
    config: dict[str, Any]
    gone: list[int] = field(default_factory=lambda: list(_gone))


def seated(seat: Seat, replica: Replica) -> Player:
    """The player that this follower keeps between calls."""
    assert follower.desk is not None
    players = follower.desk.things.setdefault("keras", {})
    for number in seat.gone:
        if number in players:
            players.pop(number).close()
    if seat.model is not None:
        if seat.number in players:
            players[seat.number].close()
        environment.configure(seat.config)
        parcel.settle(seat.model)
        players[seat.number] = Player(seat.model, replica, seat.settings)
    player: Player = players[seat.number]
    return player
