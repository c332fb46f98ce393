"""What a member does with what it hears: keeps it, passes it on, says who is silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stratagem.cluster.failure import Failure, Member
from stratagem.cluster.heartbeat import STALL, Heartbeats
from stratagem.cluster.note_gather import KeyValues, Note, NoteGather

log = logging.getLogger("stratagem")

#: the rank of a hub that is no member: `stratagem run`, which outlives every task
OUTSIDE = -1


@dataclass(frozen=True)
class RouterOutputs:
    """Where a switchboard's findings go; none of these may block."""

    tell: Callable[[Mapping[str, object], int | None], None]  # all connected but this rank
    hang_up: Callable[[int], None]
    trouble: Callable[[Failure], None]
    quiet: Callable[[], bool]  # trouble came, or we left: nothing more to say
    told: Callable[[Mapping[str, object]], None]  # a note for the first member alone


class MessageRouter:
    """The listener of a Star; every method runs on the star's thread."""

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        hub: Member | None,
        watched: Iterable[int],
        rounds: NoteGather,
        board: KeyValues,
        outlets: RouterOutputs,
        give_up: float,
    ) -> None:
        self._members = list(members)
        self._rank = rank
        self._outside = hub
        #: whether this one passes on what it hears
        self._is_hub = rank == (0 if hub is None else OUTSIDE)
        self._rounds = rounds
        self._board = board
        self._out = outlets
        self._give_up = give_up
        self._heartbeat = Heartbeats(watched, time.monotonic(), give_up)

    def expect(self, rank: int, member: Member) -> None:
        """Another process has taken this member's place."""
        self._members[rank] = member
        self._heartbeat.expect(rank, time.monotonic())

    def alive(self, rank: int, now: float) -> None:
        """Note a sign of life; say so if this member had been named silent."""
        seconds = self._heartbeat.heard(rank, now)
        if seconds is not None and not self._out.quiet():
            self._say("back", rank, round(seconds))

    def heard(self, rank: int, note: Note) -> None:
        """Act on a note; raises what makes it nonsense."""
        kind = note["t"]
        if kind == "beat":
            return
        about = _number(note, "rank")
        if kind == "trouble":
            self._out.trouble(Failure.from_note(note))
        elif self._is_hub and about != rank:
            raise ValueError(f"it spoke in the name of rank {about}")
        elif kind == "note":
            self._hear_note(about, note)
        elif kind == "word":
            self._hear_word(about, note)
        elif kind == "told":
            self._hear_told(about, note)
        elif kind == "bye":
            self._hear_bye(about)
        elif kind in ("silent", "back") and not self._is_hub:
            self._say(str(kind), about, _number(note, "seconds"))
        else:
            raise ValueError(f"it sent {kind!r}, which this member does not know")

    def _hear_note(self, rank: int, note: Note) -> None:
        self._rounds.keep(_number(note, "turn"), rank, _body(note))
        self._pass_on(note, but=rank)

    def _hear_word(self, rank: int, note: Note) -> None:
        key, word = note["key"], note["word"]
        if not isinstance(key, str) or not isinstance(word, str):
            raise ValueError("it sent a word for the board that is no text")
        self._board.keep(key, word)
        self._pass_on(note, but=rank)

    def _hear_told(self, rank: int, note: Note) -> None:
        """Notes for the first member, which may come by way of a hub outside."""
        body = _body(note)
        if self._rank == 0:
            self._out.told(body)
        self._pass_on(note, but=rank)

    def _hear_bye(self, rank: int) -> None:
        if rank == OUTSIDE:
            self.lost(rank, "it has ended")
            return
        self._heartbeat.forget(rank)
        self._rounds.depart(rank)
        self._pass_on({"t": "bye", "rank": rank}, but=rank)
        self._out.hang_up(rank)

    def _pass_on(self, note: Mapping[str, object], but: int | None = None) -> None:
        if self._is_hub:
            self._out.tell(note, but)

    def _who(self, rank: int) -> Member:
        return self._outside if self._outside and rank == OUTSIDE else self._members[rank]

    def lost(self, rank: int, why: str) -> None:
        """Take the end of a connection without a goodbye for a death."""
        self._heartbeat.forget(rank)
        self._out.trouble(Failure(rank, self._who(rank), "died", why))

    def tick(self, now: float) -> None:
        """See who is silent, and for whom patience has run out."""
        silences = self._heartbeat.check(now)
        if self._heartbeat.overslept >= STALL and not self._out.quiet():
            log.warning(
                "%s, this process, did not run for %.0f s: stopped, swapped out, or one call kept "
                "Python's interpreter lock",
                self._who(self._rank),
                self._heartbeat.overslept,
            )
        for silence in silences:
            rank, seconds = silence.rank, round(silence.seconds)
            if silence.over:  # also after a first trouble: others may wait for this one
                why = f"nothing was heard of it for {seconds} s"
                self._out.trouble(Failure(rank, self._who(rank), "stalled", why))
            elif not self._out.quiet():
                self._say("silent", rank, seconds)

    def _say(self, kind: str, rank: int, seconds: int) -> None:
        """Log who is silent or back, here and, from the hub, on every spoke."""
        if rank != self._rank and kind == "silent":
            log.warning(
                "%s has not answered for %d s: stopped, swapped out, or cut off; waiting for it, "
                "giving up in %.0f s",
                self._who(rank),
                seconds,
                max(0.0, self._give_up - seconds),
            )
        elif rank != self._rank:
            log.warning("%s answers again, after %d s", self._who(rank), seconds)
        self._pass_on({"t": kind, "rank": rank, "seconds": seconds})


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
