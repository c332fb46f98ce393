"""Where every ticket of the epoch is: in the deck, in somebody's hands, or done and kept."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.rules.crew import Crew, Member
from stratagem.rules.deck import Deck
from stratagem.rules.push import Push, Ticket
from stratagem.rules.ramp import Ramp


@dataclass(slots=True)
class Hand:
    """A ticket that is being worked on, and by whom."""

    ticket: Ticket
    members: list[Member]


class Table:
    """What gates look at. A ticket is in one place only; several workers may have a copy of it."""

    def __init__(self, version: int, warmup: Ramp | None = None) -> None:
        self.version = version
        self.deck = Deck()
        self.crew = Crew(warmup)
        #: what is being worked on, by serial
        self.hands: dict[int, Hand] = {}
        #: pushes that wait for the gate
        self.kept: list[Push] = []
        #: tickets in hands beyond the first of each serial
        self.copies = 0
        #: members that were given a ticket at this version
        self.served = 0
        #: the batch of the ticket given last (Ticket.first), and how many have had a part of it
        self.batch = -1
        self.had = 0
        #: workers whose ticket was taken from them, until somebody asks
        self.overtaken: list[int] = []

    @property
    def left(self) -> int:
        """Tickets dealt and not yet applied."""
        return len(self.deck) + len(self.hands) + len(self.kept)

    def give(self, member: Member, ticket: Ticket) -> None:
        """Put a ticket, or a copy of one, into a free member's hands."""
        hand = self.hands.get(ticket.serial)
        if hand is None:
            self.hands[ticket.serial] = Hand(ticket, [member])
        else:
            hand.members.append(member)
            self.copies += 1
        member.ticket, member.revoked = ticket, None
        if member.stamp != self.version:
            member.stamp = self.version
            self.served += 1
        batch = ticket.first
        if self.batch != batch:
            self.batch, self.had = batch, 0
        if member.batch != batch:
            member.batch = batch
            self.had += 1

    def disown(self, member: Member) -> None:
        """The member goes, or has not done its part of the batch."""
        self.had -= member.batch == self.batch
        member.batch = -1

    def release(self, member: Member, ticket: Ticket) -> bool:
        """Take its ticket out of a member's hands; returns whether nobody else has a copy."""
        members = self.hands[ticket.serial].members
        members.remove(member)
        member.ticket = None  # as _free does
        if not member.admitted:
            self.crew.freed(member)
        if members:
            self.copies -= 1
            return False
        del self.hands[ticket.serial]
        return True

    def unserve(self, member: Member) -> None:
        """What the member was given at this version does not count."""
        if member.stamp == self.version:
            member.stamp = -1
            self.served -= 1

    def revoke(self, serial: int) -> Ticket:
        """Take a ticket from all who have it; they are late."""
        hand = self.hands.pop(serial)
        self.copies -= len(hand.members) - 1
        for member in hand.members:
            self._free(member)
            member.revoked = serial
            self.overtaken.append(member.worker)
        return hand.ticket

    def advance(self) -> tuple[Push, ...]:
        """The next version begins; returns the pushes that made it."""
        pushes = tuple(self.kept)
        self.kept.clear()
        self.version += 1
        self.served = 0
        self.crew.admit(self.version)
        return pushes

    def _free(self, member: Member) -> None:
        member.ticket = None
        if not member.admitted:
            self.crew.freed(member)
