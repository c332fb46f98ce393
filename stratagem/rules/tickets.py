"""Tickets: the work that workers are given, its result, the decision about it, and the update.

`TicketQueue` has the tickets of the epoch that no worker holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from stratagem.errors import UsageError


class Ticket(NamedTuple):
    """A piece of work: batch `batch` of the epoch, or part `part` of the `parts` it is cut into.

    `serial` is unique over the whole job; the parts of one batch have consecutive ones.
    """

    serial: int
    batch: int
    part: int = 0
    parts: int = 1

    @property
    def first(self) -> int:
        """The serial of part 0 of the same batch: what all parts of a batch have in common."""
        return self.serial - self.part


@dataclass(slots=True)
class Push:
    """A gradient that arrived: of weights of `version`, with `weight` examples behind it.

    Nobody changes it; to freeze it would take longer than to judge it.
    """

    worker: int
    serial: int
    version: int
    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < inf:
            raise UsageError(
                f"worker {self.worker} pushed a gradient of weight {self.weight}; the weight is "
                "the number of examples behind it (or their sum of weights): finite, not negative."
            )


class Verdict(NamedTuple):
    """The one decision about a push, for all shards alike.

    kept: it goes into the sum as factor * weight * gradient; `rate` is what it asks of the
    learning rate of its update. Otherwise `why` says in words what it was dropped for.
    """

    kept: bool
    tau: int
    factor: float
    rate: float
    why: str


class Update(NamedTuple):
    """The gate opened: the step that takes the parameters to `version`.

    The mean gradient is the sum of factor * weight * gradient over `pushes`, by `divisor`, the sum
    of the weights (0 if there was no example behind any of them). The optimizer's learning rate is
    times `rate`, the smallest that a push asked for.
    """

    version: int
    pushes: tuple[Push, ...]
    divisor: float
    rate: float


class TicketQueue:
    """Tickets in the order of their serials.

    What is put back has been drawn before, so it is older than all that was not and comes to the
    front; the oldest comes first among several.
    """

    def __init__(self) -> None:
        self.closed = False
        #: the ticket that is drawn next, if any, and its batch (Ticket.first), else -1; these are
        #: looked at more often than they change
        self.front: Ticket | None = None
        self.batch = -1
        self._fresh: deque[Ticket] = deque()
        self._returned: list[tuple[int, Ticket]] = []
        self._serial = self._first = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    @property
    def of_front(self) -> int:
        """How many tickets of the front one's batch are here."""
        batch, returned = self.batch, 0
        if self._returned:
            returned = sum(ticket.first == batch for _, ticket in self._returned)
        if not self._fresh:
            return returned
        serial, _, part, parts = self._fresh[0]
        return returned + parts - part if serial - part == batch else returned

    def clear(self) -> None:
        """Nothing of what was dealt so far is drawn any more."""
        self._first = self._serial
        self._fresh.clear()
        self._returned.clear()
        self._look()

    def end_with(self, last: int) -> None:
        """Nothing is drawn of batches after the one that begins with the serial `last`."""
        self._fresh = deque(ticket for ticket in self._fresh if ticket.first <= last)
        self._look()

    def add(self, batch: int, parts: int = 1) -> int:
        """Deal a batch, cut into `parts` tickets; returns the serial of the first."""
        if self.closed:
            raise UsageError(f"batch {batch} was dealt after the epoch was closed; open it first.")
        if parts < 1:
            raise UsageError(f"batch {batch} was cut into {parts} parts; it takes at least one.")
        for part in range(parts):
            self._fresh.append(Ticket(self._serial, batch, part, parts))
            self._serial += 1
        if self.front is None:
            self._look()
        return self._serial - parts

    def draw(self) -> Ticket:
        """Take the front ticket."""
        drawn = heappop(self._returned)[1] if self._returned else self._fresh.popleft()
        self._look()
        return drawn

    def put_back(self, ticket: Ticket) -> bool:
        """Return a ticket that was drawn; whether it had not been given up meanwhile."""
        if ticket.serial < self._first:
            return False
        heappush(self._returned, (ticket.serial, ticket))
        self._look()
        return True

    def _look(self) -> None:
        front = self._returned[0][1] if self._returned else None
        if front is None and self._fresh:
            front = self._fresh[0]
        self.front = front
        self.batch = -1 if front is None else front[0] - front[2]
