"""Messages from one member to all: a key-value board, and an all-gather of notes."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from stratagem.cluster.failure import Failure, Member
from stratagem.cluster.handshake import NOTE_LIMIT
from stratagem.cluster.parsing import listing
from stratagem.cluster.waiting import Wait
from stratagem.errors import ReplicaLost, ReplicaStalled, UsageError

log = logging.getLogger("stratagem")

Note = dict[str, object]
OnWord = Callable[[str, str], object]

_FRAME = 1024  # bytes kept free in a note for its envelope
_FIRST_LINE = 5.0  # seconds until a waiting member logs who is missing


class KeyValues:
    """A key-value store that is replicated on every member; keys and values are text.

    Each key has one writer, which sends the value to all members; to wait for a key is to wait for
    the local copy. `changed` is the owner's condition.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._words: dict[str, str] = {}
        self._callbacks: list[OnWord] = []

    def keep(self, key: str, word: str) -> bool:
        """Store a word and call back; return False if the key already had this word."""
        with self._changed:
            if self._words.get(key) == word:
                return False
            self._words[key] = word
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback(key, word)
        return True

    def on_word(self, callback: OnWord) -> None:
        """Call back with every stored word, and every new one."""
        with self._changed:
            words = list(self._words.items())
            self._callbacks.append(callback)
        for key, word in words:
            callback(key, word)

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all these keys have been written."""
        return all(key in self._words for key in keys)

    def read(self, key: str) -> str:
        """Return the word of a key that has been written."""
        return self._words[key]

    def wait(
        self, keys: Iterable[str], limit: float, trouble: Callable[[], Failure | None]
    ) -> None:
        """Wait until all keys are written; raise the trouble, or TimeoutError after `limit`."""
        keys = list(keys)
        until = time.monotonic() + limit
        with self._changed:
            self._changed.wait_for(lambda: self.has(keys) or trouble(), until - time.monotonic())
            if self.has(keys):
                return
        found = trouble()
        if found is not None:
            raise found.error()
        raise TimeoutError(f"nothing was written under {keys[0]!r} within {limit:.0f} s")


class HubNotes:
    """Notes for the hub alone, which does not forward them; no member waits for one."""

    def __init__(self, rank: int, send: Callable[[Note], object]) -> None:
        self._rank, self._send = rank, send
        self._callbacks: list[Callable[[Mapping[str, object]], object]] = []

    def on_note(self, callback: Callable[[Mapping[str, object]], object]) -> None:
        """On the hub: call back with every note; a callback raises ValueError on nonsense."""
        self._callbacks.append(callback)

    def give(self, note: Mapping[str, object]) -> None:
        """Send a note to the hub."""
        if self._rank:
            self._send({"t": "to hub", "rank": self._rank, "note": as_sent(note)})
            return
        for callback in self._callbacks:
            callback(note)


class NoteGather:
    """The notes of an all-gather, by turn and rank, and the members that left.

    `changed` is the owner's condition; it is notified of every arrival.
    """

    def __init__(self, members: Sequence[Member], changed: threading.Condition) -> None:
        self._members = members
        self._changed = changed
        self._next = 0
        self._notes: dict[int, dict[int, Note]] = {}
        self._departed: set[int] = set()

    def begin(self) -> int:
        """Return the number of the next turn; members agree on it as they call equally often."""
        with self._changed:
            turn = self._next
            self._next += 1
        return turn

    def keep(self, turn: int, rank: int, note: Note) -> None:
        """Store a member's note, which may come before this member begins that turn."""
        with self._changed:
            self._notes.setdefault(turn, {})[rank] = note
            self._changed.notify_all()

    def depart(self, rank: int) -> None:
        """Expect no more notes from a member."""
        with self._changed:
            self._departed.add(rank)
            self._changed.notify_all()

    def departed(self) -> set[int]:
        """The ranks of the members that finished and left."""
        return set(self._departed)

    def raise_if_departed(self) -> None:
        """Raise if a member has left; for a caller that waits for all members."""
        if self._departed:
            with self._changed:
                gone = [self._members[rank] for rank in sorted(self._departed)]
            raise _absent(gone)

    def gather(self, turn: int, limit: float, trouble: Callable[[], Failure | None]) -> list[Note]:
        """Wait for the notes of all members; raise as soon as one of them cannot come."""
        patience = Wait(limit, first=[_FIRST_LINE])
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._decided(turn) or trouble(), patience.pause)
                if not self._missing(turn):
                    notes = self._notes.pop(turn)
                    return [notes[rank] for rank in range(len(self._members))]
                late = [self._members[rank] for rank in self._missing(turn)]
                gone = [self._members[rank] for rank in self._lost(turn)]
            found = trouble()
            if found is not None:
                raise found.error()
            _log_missing(late, gone, patience)

    def _missing(self, turn: int) -> list[int]:
        here = self._notes.get(turn, {})
        return [rank for rank in range(len(self._members)) if rank not in here]

    def _lost(self, turn: int) -> list[int]:
        """The ranks whose note cannot come: they left, or rank 0, which forwards notes, did."""
        missing = self._missing(turn)
        gone = [rank for rank in missing if rank in self._departed]
        return gone or ([0] if missing and 0 in self._departed else [])

    def _decided(self, turn: int) -> bool:
        return not self._missing(turn) or bool(self._lost(turn))


def _log_missing(late: Sequence[Member], gone: Sequence[Member], patience: Wait) -> None:
    """Log now and then who is missing; raise when there is no point in waiting."""
    if gone:
        raise _absent(gone)
    names = listing([str(member) for member in late])
    if patience.over:
        raise ReplicaStalled(
            f"{names} did not come to the point where the others wait, within "
            f"{patience.waited:.0f} s: slow, stuck, or running another script. See where it is "
            "(its log; `py-spy dump`), or allow it more time.",
            late[0].name,
        )
    if patience.due():
        log.warning("waiting for %s to come to the same point, %.0f s", names, patience.waited)


def _absent(gone: Sequence[Member]) -> ReplicaLost:
    return ReplicaLost(
        f"{listing([str(member) for member in gone])} finished and left while others still "
        "wait: every task must run the same script for the same number of steps.",
        gone[0].name,
    )


def as_sent(note: Mapping[str, object]) -> Note:
    """Return a note as JSON gives it to its receivers, so that the sender sees the same."""
    text = json.dumps(note)
    if len(text) > NOTE_LIMIT - _FRAME:
        raise UsageError(
            f"a note of {len(text)} bytes is over the limit of {NOTE_LIMIT - _FRAME}: notes carry "
            "facts about the job; tensors and data travel over the wire"
        )
    sent: Note = json.loads(text)
    return sent
