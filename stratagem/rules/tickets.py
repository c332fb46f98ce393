"""Tickets: units of work, their results, the decisions about these, and updates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from stratagem.errors import UsageError


class Ticket(NamedTuple):
    """A unit of work: batch `batch` of the epoch, or part `part` of its `parts`.

    `serial` is unique over the whole job; the parts of one batch have consecutive ones.
    """

    serial: int
    batch: int
    part: int = 0
    parts: int = 1

    @property
    def first(self) -> int:
        """The serial of part 0 of the same batch, which identifies the batch."""
        return self.serial - self.part


@dataclass(slots=True)
class Push:
    """A gradient that arrived, computed from `weight` examples with the weights of `version`.

    It is never changed, but not frozen either: freezing would take longer than judging.
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
    """The decision about a push, the same for all shards.

    kept: the push enters the sum as factor * weight * gradient, and asks for `rate` times the
    learning rate of its update. Otherwise `why` says in words why it was dropped.
    """

    kept: bool
    tau: int
    factor: float
    rate: float
    why: str


class Update(NamedTuple):
    """An update that takes the parameters to `version`.

    The mean gradient is the sum of factor * weight * gradient over `pushes`, divided by `divisor`,
    the sum of the weights (0 if there were no examples). The learning rate is multiplied by `rate`,
    the smallest that a push asked for.
    """

    version: int
    pushes: tuple[Push, ...]
    divisor: float
    rate: float


class TicketQueue:
    """The tickets of the epoch that no worker holds, in the order of their serials.

    A ticket that is put back is older than all that were never drawn, so it comes to the front.
    """

    def __init__(self) -> None:
        self.closed = False
        #: the ticket that is drawn next, if any, and its batch (Ticket.first), else -1; kept since
        #: they are read more often than they change
        self.front: Ticket | None = None
        self.batch = -1
        self._fresh: deque[Ticket] = deque()
        self._returned: list[tuple[int, Ticket]] = []
        self._serial = self._first = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    @property
    def of_front(self) -> int:
        """How many tickets of the front ticket's batch are queued."""
        batch, returned = self.batch, 0
        if self._returned:
            returned = sum(ticket.first == batch for _, ticket in self._returned)
        if not self._fresh:
            return returned
        serial, _, part, parts = self._fresh[0]
        return returned + parts - part if serial - part == batch else returned

    def clear(self) -> None:
        """Give up all tickets dealt so far."""
        self._first = self._serial
        self._fresh.clear()
        self._returned.clear()
        self._look()

    def end_with(self, last: int) -> None:
        """Give up batches after the one that begins with the serial `last`."""
        self._fresh = deque(ticket for ticket in self._fresh if ticket.first <= last)
        self._look()

    def add(self, batch: int, parts: int = 1) -> int:
        """Deal a batch, cut into `parts` tickets; return the serial of the first."""
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
        """Put back a ticket that was drawn; return False if it was given up meanwhile."""
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
