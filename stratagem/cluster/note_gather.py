"""What members tell all others: words under keys, and an all-gather of notes."""

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

_FRAME = 1024  # bytes kept free in a note for what is written around it
_SPEAK = 5.0  # seconds until a waiting member says whom it waits for


class KeyValues:
    """Words that members leave for each other: a key and a text, the same on every member.

    Each key has one writer. Whoever waits for a key waits here, not at a server: every member holds
    all of them, and a word goes out to all when it is written. `changed` is the owner's condition.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._words: dict[str, str] = {}
        self._callbacks: list[OnWord] = []

    def keep(self, key: str, word: str) -> bool:
        """Take a word, and tell who wants to know; False if it was here already."""
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
        """Call back with every word that is here, and every new one."""
        with self._changed:
            words = list(self._words.items())
            self._callbacks.append(callback)
        for key, word in words:
            callback(key, word)

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these have been written."""
        return all(key in self._words for key in keys)

    def read(self, key: str) -> str:
        """Return the word under this key, which must be here."""
        return self._words[key]

    def wait(
        self, keys: Iterable[str], limit: float, trouble: Callable[[], Failure | None]
    ) -> None:
        """Wait until all of these are here; raise trouble, or TimeoutError after `limit`."""
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
    """Notes for the hub alone, which it does not pass on; nobody waits for them."""

    def __init__(self, rank: int, send: Callable[[Note], object]) -> None:
        self._rank, self._send = rank, send
        self._callbacks: list[Callable[[Mapping[str, object]], object]] = []

    def on_note(self, callback: Callable[[Mapping[str, object]], object]) -> None:
        """On the hub: call back with every note; a ValueError says that it is nonsense."""
        self._callbacks.append(callback)

    def give(self, note: Mapping[str, object]) -> None:
        """Give the hub a note."""
        if self._rank:
            self._send({"t": "told", "rank": self._rank, "note": as_sent(note)})
            return
        for callback in self._callbacks:
            callback(note)


class NoteGather:
    """Notes by turn and rank; `changed` is the owner's condition, told of every arrival."""

    def __init__(self, members: Sequence[Member], changed: threading.Condition) -> None:
        self._members = members
        self._changed = changed
        self._next = 0
        self._notes: dict[int, dict[int, Note]] = {}
        self._departed: set[int] = set()

    def begin(self) -> int:
        """Return the number of the next turn: members agree on it by calling equally often."""
        with self._changed:
            turn = self._next
            self._next += 1
        return turn

    def keep(self, turn: int, rank: int, note: Note) -> None:
        """Take a member's note; it may come before this member begins that turn."""
        with self._changed:
            self._notes.setdefault(turn, {})[rank] = note
            self._changed.notify_all()

    def depart(self, rank: int) -> None:
        """Expect no more notes of a member."""
        with self._changed:
            self._departed.add(rank)
            self._changed.notify_all()

    def departed(self) -> set[int]:
        """The ranks of those who finished and left."""
        return set(self._departed)

    def raise_if_departed(self) -> None:
        """Raise if anybody has left: for those who wait for everybody."""
        if self._departed:
            with self._changed:
                gone = [self._members[rank] for rank in sorted(self._departed)]
            raise _absent(gone)

    def gather(self, turn: int, limit: float, trouble: Callable[[], Failure | None]) -> list[Note]:
        """Wait for the notes of all; raise as soon as they cannot all come."""
        patience = Wait(limit, first=[_SPEAK])
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._decided(turn) or trouble(), patience.pause)
                if not self._missing(turn):
                    notes = self._notes.pop(turn)
                    return [notes[rank] for rank in range(len(self._members))]
                late = [self._members[rank] for rank in self._missing(turn)]
                gone = [self._members[rank] for rank in self._never(turn)]
            found = trouble()
            if found is not None:
                raise found.error()
            _speak(late, gone, patience)

    def _missing(self, turn: int) -> list[int]:
        here = self._notes.get(turn, {})
        return [rank for rank in range(len(self._members)) if rank not in here]

    def _never(self, turn: int) -> list[int]:
        """Ranks whose note cannot come: they left, or rank 0, who passes notes on, has."""
        missing = self._missing(turn)
        gone = [rank for rank in missing if rank in self._departed]
        return gone or ([0] if missing and 0 in self._departed else [])

    def _decided(self, turn: int) -> bool:
        return not self._missing(turn) or bool(self._never(turn))


def _speak(late: Sequence[Member], gone: Sequence[Member], patience: Wait) -> None:
    """Say who is missing, when it is time; raise when there is no point in waiting."""
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
    """Return a note as its receivers will see it, so that all members see the same."""
    text = json.dumps(note)
    if len(text) > NOTE_LIMIT - _FRAME:
        raise UsageError(
            f"a note of {len(text)} bytes is over the limit of {NOTE_LIMIT - _FRAME}: notes carry "
            "facts about the job; tensors and data travel over the wire"
        )
    sent: Note = json.loads(text)
    return sent
