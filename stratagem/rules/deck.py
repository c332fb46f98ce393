"""The tickets of the epoch that nobody works on."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from stratagem.errors import UsageError
from stratagem.rules.push import Ticket


class Deck:
    """Tickets in the order of their serials.

    What is put back has been drawn before, so it is older than all that was not and comes to the
    front; the oldest comes first among several.
    """

    def __init__(self) -> None:
        self.closed = False
        #: the ticket that is drawn next, if any; it is looked at more often than it changes
        self.front: Ticket | None = None
        self._fresh: deque[Ticket] = deque()
        self._returned: list[tuple[int, Ticket]] = []
        self._serial = self._first = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    @property
    def of_front(self) -> int:
        """How many tickets of the front one's batch are here."""
        if self.front is None:
            return 0
        batch = self.front.first
        returned = sum(ticket.first == batch for _, ticket in self._returned)
        fresh = self._fresh[0] if self._fresh else None
        if fresh is None or fresh.first != batch:
            return returned
        return returned + fresh.parts - fresh.part

    def clear(self) -> None:
        """Nothing of what was dealt so far is drawn any more."""
        self._first = self._serial
        self._fresh.clear()
        self._returned.clear()
        self.front = None

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
        if self._returned:
            self.front = self._returned[0][1]
        else:
            self.front = self._fresh[0] if self._fresh else None
