r"""The membership of a job: a star of connections around the hub, and the first failure in it.

    spoke 1 ---\
    spoke 2 ---- hub (rank 0, the chief)      heartbeats both ways; the hub forwards messages
    spoke 3 ---/

The sockets are connected and authenticated: `rendezvous.form` opens them over TCP between the
tasks of a cluster; a process that starts its own replicas passes socket pairs.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from stratagem.cluster.failure import DEPARTURES, Failure, Member, shorten
from stratagem.cluster.heartbeat import GIVE_UP, STALL, Heartbeats
from stratagem.cluster.note_gather import HubNotes, KeyValues, Note, NoteGather, as_sent
from stratagem.cluster.star import Star
from stratagem.errors import UsageError

__all__ = ["OUTSIDE", "Failure", "Member", "Membership"]

log = logging.getLogger("stratagem")

FLUSH = 1.0  # seconds that a report may take to leave this process
#: the rank of a hub that is no member: `stratagem run`, which outlives every task
OUTSIDE = -1

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
        """`hub`: the process that forwards messages, if it is not rank 0; its rank is OUTSIDE."""
        self.members = tuple(members)
        self.rank = rank
        self._changed = threading.Condition()
        self._trouble: Failure | None = None
        self._callbacks: list[Callback] = []
        #: small notes for rank 0 alone
        self.to_hub = HubNotes(rank, self._tell)
        self._left = False
        #: names of the members that died, fell silent or came too late, at any time
        self._gone: set[str] = set()
        self._rounds = NoteGather(self.members, self._changed)
        self.board = KeyValues(self._changed)
        self._router = MessageRouter(self, hub, sockets, give_up)
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
        """A membership of one process."""
        return cls([member or Member("this process", "alone")], 0, {})

    def exchange(self, note: Mapping[str, object], limit: float) -> list[dict[str, object]]:
        """All-gather a note; return all notes by rank. Members call it in the same order."""
        own = as_sent(note)
        self.raise_if_trouble()
        if self._left:
            raise UsageError("this process has left the job: exchange() comes before leave()")
        turn = self._rounds.begin()
        self._rounds.keep(turn, self.rank, own)
        self._tell({"t": "note", "rank": self.rank, "turn": turn, "note": own})
        return self._rounds.gather(turn, limit, lambda: self._trouble)

    def publish(self, key: str, word: str, *, within: float = 0.0) -> None:
        """Write a word on every member's board; each key has one writer. With `within`, wait at
        most so many seconds until the kernel has sent it."""
        if not self._left and self.board.keep(key, word):
            self._tell({"t": "word", "rank": self.rank, "key": key, "word": word})
            if within and self._star is not None:
                self._star.flush(within)

    @property
    def trouble(self) -> Failure | None:
        """The first trouble, or None; cheap enough for a loop that spins."""
        return self._trouble

    def await_trouble(self, seconds: float) -> Failure | None:
        """Wait for trouble that may explain an error seen elsewhere, such as a closed socket."""
        with self._changed:
            self._changed.wait_for(lambda: self._trouble, seconds)
        return self._trouble

    def raise_if_trouble(self) -> None:
        """Raise the first trouble, if there is one."""
        if self._trouble is not None:
            raise self._trouble.error()

    def raise_if_over(self) -> None:
        """Before a group is started: raise what an earlier call of the job has failed by."""
        if self._trouble is not None and self._trouble.kind == "failed":
            raise self._trouble.of_earlier_call()
        self.raise_if_trouble()

    def raise_if_gone(self) -> None:
        """Raise the first trouble, or the absence of a member that finished and left."""
        self.raise_if_trouble()
        self._rounds.raise_if_departed()

    @property
    def still_here(self) -> frozenset[str]:
        """The names of the members that have neither failed nor left."""
        with self._changed:
            left = {self.members[rank].name for rank in self._rounds.departed()}
            return frozenset({each.name for each in self.members} - self._gone - left)

    def report_failure(self, detail: str, refusal: str = "") -> None:
        """Tell all members that this one raised: a traceback, or a refusal's text and class."""
        me = self.members[self.rank]
        self.announce(Failure(self.rank, me, "failed", shorten(detail), refusal))

    def announce(self, trouble: Failure) -> None:
        """Tell all members of a trouble seen elsewhere, such as the death of a worker's replica."""
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
        """Say goodbye, so that no member takes the end for a death; stop the thread, close all
        sockets.

        Without `wait` the goodbye is sent in the background: a peer that is cut off answers none.
        """
        with self._changed:
            first, self._left = not self._left, True
        if self._star is not None:
            if first:
                self._tell({"t": "bye", "rank": self.rank})
            self._star.stop(wait=wait)

    def _become(self, trouble: Failure) -> None:
        """Record the first trouble, forward it, and call back with no lock held."""
        with self._changed:
            if trouble.kind in DEPARTURES:
                self._gone.add(trouble.member.name)
            if self._is_over():
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
        """Send to every connected member: the hub to its spokes, a spoke to its hub."""
        if self._star is not None:
            self._star.post(note, but=but)

    def _is_over(self) -> bool:
        return self._trouble is not None or self._left


def _call_back(callback: Callback, trouble: Failure) -> None:
    try:
        callback(trouble)
    except Exception:
        log.exception("a callback about %s failed", trouble.member)


class MessageRouter:
    """What a membership does with its messages: store, forward, name the silent members.

    It is the handler of a Star: every method runs on the star's thread.
    """

    def __init__(
        self, here: Membership, hub: Member | None, watched: Iterable[int], give_up: float
    ) -> None:
        self._here = here
        self._outside = hub
        self._is_hub = here.rank == (0 if hub is None else OUTSIDE)
        self._give_up = give_up
        self._heartbeat = Heartbeats(watched, time.monotonic(), give_up)

    def expect(self, rank: int) -> None:
        """Watch a process that has taken the place of a dead member."""
        self._heartbeat.expect(rank, time.monotonic())

    def alive(self, rank: int, now: float) -> None:
        """Note a sign of life; log it if this member had been named silent."""
        seconds = self._heartbeat.heard(rank, now)
        if seconds is not None and not self._here._is_over():
            self._log_silence("back", rank, round(seconds))

    def heard(self, rank: int, note: Note) -> None:
        """Act on a message; raise if it is malformed."""
        kind = note["t"]
        if kind == "beat":
            return
        about = _number(note, "rank")
        if kind == "trouble":
            self._here._become(Failure.from_note(note))
        elif self._is_hub and about != rank:
            raise ValueError(f"it spoke in the name of rank {about}")
        elif kind == "note":
            self._here._rounds.keep(_number(note, "turn"), about, _body(note))
            self._forward(note, about)
        elif kind == "word":
            self._hear_word(about, note)
        elif kind == "to hub":  # for rank 0, perhaps by way of a hub outside
            if self._here.rank == 0:
                self._here.to_hub.give(_body(note))
            self._forward(note, about)
        elif kind == "bye":
            self._hear_bye(about)
        elif kind in ("silent", "back") and not self._is_hub:
            self._log_silence(str(kind), about, _number(note, "seconds"))
        else:
            raise ValueError(f"it sent {kind!r}, which this member does not know")

    def _hear_word(self, rank: int, note: Note) -> None:
        key, word = note["key"], note["word"]
        if not isinstance(key, str) or not isinstance(word, str):
            raise ValueError("it sent a word for the board that is no text")
        self._here.board.keep(key, word)
        self._forward(note, rank)

    def _hear_bye(self, rank: int) -> None:
        if rank == OUTSIDE:
            self.lost(rank, "it has ended")
            return
        self._heartbeat.forget(rank)
        self._here._rounds.depart(rank)
        self._forward({"t": "bye", "rank": rank}, rank)
        if self._here._star is not None:
            self._here._star.drop(rank)

    def _forward(self, note: Mapping[str, object], sender: int | None = None) -> None:
        if self._is_hub:
            self._here._tell(note, sender)

    def _member(self, rank: int) -> Member:
        return self._outside if self._outside and rank == OUTSIDE else self._here.members[rank]

    def lost(self, rank: int, why: str) -> None:
        """Take the end of a connection without a goodbye for a death."""
        self._heartbeat.forget(rank)
        self._here._become(Failure(rank, self._member(rank), "died", why))

    def tick(self, now: float) -> None:
        """Log who is silent; give up who has been silent too long."""
        silences = self._heartbeat.check(now)
        if self._heartbeat.overslept >= STALL and not self._here._is_over():
            log.warning(
                "%s, this process, did not run for %.0f s: stopped, swapped out, or one call kept "
                "Python's interpreter lock",
                self._member(self._here.rank),
                self._heartbeat.overslept,
            )
        for silence in silences:
            rank, seconds = silence.rank, round(silence.seconds)
            if silence.over:  # also after a first trouble: the next generation may wait for it
                why = f"nothing was heard of it for {seconds} s"
                self._here._become(Failure(rank, self._member(rank), "stalled", why))
            elif not self._here._is_over():
                self._log_silence("silent", rank, seconds)

    def _log_silence(self, kind: str, rank: int, seconds: int) -> None:
        """Log that a member is silent or back, here and, from the hub, on every spoke."""
        if rank != self._here.rank and kind == "silent":
            log.warning(
                "%s has not answered for %d s: stopped, swapped out, or cut off; waiting for it, "
                "giving up in %.0f s",
                self._member(rank),
                seconds,
                max(0.0, self._give_up - seconds),
            )
        elif rank != self._here.rank:
            log.warning("%s answers again, after %d s", self._member(rank), seconds)
        self._forward({"t": kind, "rank": rank, "seconds": seconds})


def _body(note: Note) -> Note:
    body = note["note"]
    if not isinstance(body, dict):
        raise ValueError("it sent a note without a body")
    return body


def _number(note: Mapping[str, object], key: str) -> int:
    value = note[key]
    if not isinstance(value, int):
        raise ValueError(f"its {key} is no whole number")
    return value
