r"""Who is here: a star of connections around the first member, and the first failure told to all.

    spoke 1 ---\
    spoke 2 ---- hub (rank 0, the chief)      beats both ways; the hub passes notes on
    spoke 3 ---/

The connections are given, connected and trusted: `rendezvous.form` makes them over TCP between
the tasks of a cluster; a process that starts its own replicas makes them as socket pairs.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from stratagem.cluster.failure import DEPARTURES, Failure, Member, shorten
from stratagem.cluster.heartbeat import GIVE_UP
from stratagem.cluster.message_router import MessageRouter, RouterOutputs
from stratagem.cluster.note_gather import HubNotes, KeyValues, NoteGather, as_sent
from stratagem.cluster.star import Star
from stratagem.errors import UsageError

__all__ = ["Failure", "Member", "Membership"]

log = logging.getLogger("stratagem")

FLUSH = 1.0  # seconds that a report may take to leave this process

Callback = Callable[[Failure], object]


class Membership:
    """A member's view of all members; made by `hub`, `spoke`, `alone` or `rendezvous.form`."""

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        sockets: Mapping[int, socket.socket],
        give_up: float = GIVE_UP,
        hub: Member | None = None,
    ) -> None:
        """`hub`: who passes notes on in the first member's stead; its rank is OUTSIDE."""
        self.members = tuple(members)
        self.rank = rank
        self._changed = threading.Condition()
        self._trouble: Failure | None = None
        self._callbacks: list[Callback] = []
        #: small notes for the first member alone
        self.to_hub = HubNotes(rank, self._tell)
        self._left = False
        #: names of those who died, fell silent or came too late, with the first trouble and after
        self._gone: set[str] = set()
        self._rounds = NoteGather(self.members, self._changed)
        self.board = KeyValues(self._changed)
        outlets = RouterOutputs(self._tell, self._hang_up, self._become, self._quiet, self._hear)
        self._router = MessageRouter(
            self.members, rank, hub, sockets, self._rounds, self.board, outlets, give_up
        )
        self._star = Star(sockets, self._router) if sockets else None
        if self._star is not None:
            self._star.start()

    @classmethod
    def hub(
        cls,
        members: Sequence[Member],
        sockets: Mapping[int, socket.socket],
        *,
        give_up: float = GIVE_UP,
    ) -> Membership:
        """Rank 0, with a connection to each of ranks 1 to n-1."""
        if sorted(sockets) != list(range(1, len(members))):
            raise UsageError(f"{len(members)} members need one socket for each rank but 0")
        return cls(members, 0, sockets, give_up)

    @classmethod
    def spoke(
        cls,
        members: Sequence[Member],
        rank: int,
        sock: socket.socket,
        *,
        give_up: float = GIVE_UP,
    ) -> Membership:
        """Rank 1 or more, with a connection to the hub."""
        if not 0 < rank < len(members):
            raise UsageError(f"rank {rank} is not that of a spoke among {len(members)} members")
        return cls(members, rank, {0: sock}, give_up)

    @classmethod
    def alone(cls, member: Member | None = None) -> Membership:
        """The only member: nobody to wait for, nobody to lose."""
        return cls([member or Member("this process", "alone")], 0, {})

    def exchange(self, note: Mapping[str, object], limit: float) -> list[dict[str, object]]:
        """Return the notes of all members by rank; every member calls it, in the same order."""
        own = as_sent(note)
        self.raise_if_trouble()
        if self._left:
            raise UsageError("this process has left the job: exchange() comes before leave()")
        turn = self._rounds.begin()
        self._rounds.keep(turn, self.rank, own)
        self._tell({"t": "note", "rank": self.rank, "turn": turn, "note": own})
        return self._rounds.gather(turn, limit, lambda: self._trouble)

    def publish(self, key: str, word: str, *, within: float = 0.0) -> None:
        """Write a word on every member's board; each key has one writer. Waits until the kernel has
        it, `within` so many seconds."""
        if not self._left and self.board.keep(key, word):
            self._tell({"t": "word", "rank": self.rank, "key": key, "word": word})
            if within and self._star is not None:
                self._star.flush(within)

    @property
    def trouble(self) -> Failure | None:
        """The first trouble, or None; one attribute is read, for loops that spin."""
        return self._trouble

    def await_trouble(self, seconds: float) -> Failure | None:
        """Wait for trouble that may be on its way: the cause of an error seen elsewhere."""
        with self._changed:
            self._changed.wait_for(lambda: self._trouble, seconds)
        return self._trouble

    def raise_if_trouble(self) -> None:
        """Raise the first trouble, if there is one."""
        if self._trouble is not None:
            raise self._trouble.error()

    def raise_if_gone(self) -> None:
        """Raise the first trouble, or the absence of a member that finished and left."""
        self.raise_if_trouble()
        self._rounds.raise_if_departed()

    @property
    def still_here(self) -> frozenset[str]:
        """The names of the members of whom nothing bad is known."""
        with self._changed:
            left = {self.members[rank].name for rank in self._rounds.departed()}
            return frozenset({each.name for each in self.members} - self._gone - left)

    def report_failure(self, detail: str) -> None:
        """Tell everybody that this member raised; `detail` is its traceback."""
        self.announce(Failure(self.rank, self.members[self.rank], "failed", shorten(detail)))

    def announce(self, trouble: Failure) -> None:
        """Tell everybody of a trouble learnt elsewhere, as of a worker's own replica."""
        self._become(trouble)
        if self._star is not None:
            self._star.flush(FLUSH)  # the caller may be about to exit

    def on_trouble(self, callback: Callback) -> None:
        """Call back once with the first trouble, from the membership's thread.

        If there already is one: at once, from the caller's thread.
        """
        with self._changed:
            found = self._trouble
            if found is None:
                self._callbacks.append(callback)
        if found is not None:
            _call_back(callback, found)

    def leave(self, *, wait: bool = True) -> None:
        """Say goodbye, so that nobody takes this for a death; end the thread, close everything.

        Without `wait`: beside what comes next, since a peer that is cut off answers no goodbye.
        """
        with self._changed:
            first, self._left = not self._left, True
        if self._star is not None:
            if first:
                self._tell({"t": "bye", "rank": self.rank})
            self._star.stop(wait=wait)

    def _become(self, trouble: Failure) -> None:
        """Take the first trouble, pass it on, and call back with no lock held."""
        with self._changed:
            if trouble.kind in DEPARTURES:
                self._gone.add(trouble.member.name)
            if self._trouble is not None or self._left:
                return
            self._trouble = trouble
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        self._tell(trouble.to_note())
        for callback in callbacks:
            if self._star is None:
                _call_back(callback, trouble)
            else:
                self._star.call(partial(_call_back, callback, trouble))

    def _tell(self, note: Mapping[str, object], but: int | None = None) -> None:
        """Send to everybody connected: the hub to its spokes, a spoke to its hub."""
        if self._star is not None:
            self._star.post(note, but=but)

    def _hear(self, note: Mapping[str, object]) -> None:
        self.to_hub.give(note)  # which may be another membership's by now

    def _hang_up(self, rank: int) -> None:
        if self._star is not None:
            self._star.drop(rank)

    def _quiet(self) -> bool:
        return self._trouble is not None or self._left


def _call_back(callback: Callback, trouble: Failure) -> None:
    try:
        callback(trouble)
    except Exception:
        log.exception("a callback about %s failed", trouble.member)
