"""What the messages of a step cost: the worker's seconds, and those of each server.

    push     one message to each server, with its part of the gradient; the lead judges it
    values   one from each server but the lead, who sends its own with the ticket; the ticket is
             a message of its own unless it came with the answer to the last push
"""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.plan.simulation.desk import Desk
from stratagem.plan.simulation.scenario import Scenario


class Bill:
    """One worker's.

    received, sent   its seconds before it computes, for what came last, and after
    """

    def __init__(self, scenario: Scenario) -> None:
        self._costs, self._work, self._parts = scenario.overhead, scenario.work, scenario.parts
        self.none = scenario.overhead.none
        self.received = 0.0
        self.sent = self._mine(len(self._parts), scenario.work.push) + self._costs.worker_step

    def pull(self, desks: Sequence[Desk], *, asked: bool, news: bool) -> None:
        """A ticket comes, and values if there are new ones."""
        size = self._work.fetched if news else 0.0
        self.received = self._mine(len(desks) - 1 + asked, size)
        for i, (desk, part) in enumerate(zip(desks, self._parts, strict=True)):
            desk.work(self._theirs(asked or i > 0, size * part))

    def push(self, desks: Sequence[Desk]) -> None:
        """A gradient has come to all servers."""
        desks[0].work(self._costs.server_step)
        for desk, part in zip(desks, self._parts, strict=True):
            desk.work(self._theirs(True, self._work.push * part))

    def _mine(self, messages: int, size: float) -> float:
        return messages * self._costs.worker_message + size * self._costs.worker_byte

    def _theirs(self, message: bool, size: float) -> float:
        return message * self._costs.server_message + size * self._costs.server_byte
