"""A simulated server: it serves and carries orders out one after the other; each takes a while."""

from __future__ import annotations

from stratagem.errors import ReplicaError
from stratagem.strategies.parameters.parties import Near
from stratagem.strategies.parameters.shard import Order
from stratagem.wire.simulated import Clock


class Desk:
    """A shard in time: `free` is when it has done all that was asked of it, `updated` all orders.

    update, add   seconds of these orders
    word          seconds of an order's own way: the lead sends it to all others, they hear it
    """

    def __init__(
        self, clock: Clock, host: int, shard: Near, update: float, add: float, word: float = 0.0
    ) -> None:
        self.host, self.free, self.updated = host, 0.0, 0.0
        self.changed, self.fetch = shard.changed, shard.fetch
        self.failure: ReplicaError | None = None
        self._clock, self._shard = clock, shard
        self._costs = {"one": update + word, "apply": update + word, "add": add + word}
        self._answer = 0.0

    def work(self, seconds: float) -> None:
        """It is busy for so long, after all that was asked of it before."""
        self.free = max(self.free, self._clock.now) + seconds

    def obey(self, order: Order) -> float:
        cost = self._costs.get(order[0])
        if cost:
            self.work(cost)
        self.updated = self.free
        self._answer = float(self._shard.obey(order) or 0.0)
        return self._answer

    def order(self, order: Order) -> None:
        self.obey(order)

    def answer(self) -> float:
        return self._answer
