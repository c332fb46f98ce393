"""A simulated server: it carries orders out one after the other, and each takes a while."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem.errors import ReplicaError
from stratagem.strategies.parameters.parties import Near
from stratagem.strategies.parameters.shard import Order
from stratagem.wire.simulated import Clock


class Desk:
    """A shard in time: `free` is when it has done all that was ordered."""

    def __init__(self, clock: Clock, host: int, shard: Near, update: float, add: float) -> None:
        self.host, self.free = host, 0.0
        self.changed = shard.changed
        self.failure: ReplicaError | None = None
        self._clock, self._shard = clock, shard
        self._costs = {"one": update, "apply": update, "add": add}
        self._answer = 0.0

    def obey(self, order: Order) -> float:
        cost = self._costs.get(order[0])
        if cost:
            self.free = max(self.free, self._clock.now) + cost
        self._answer = float(self._shard.obey(order) or 0.0)
        return self._answer

    def fetch(self, seat: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        return self._shard.fetch(seat, have, after)

    def order(self, order: Order) -> None:
        self.obey(order)

    def answer(self) -> float:
        return self._answer
