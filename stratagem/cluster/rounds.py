"""The all-gather of notes: whose are here, whose are missing, who will never come."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from stratagem.cluster.handshake import NOTE_LIMIT
from stratagem.cluster.trouble import Member, Trouble
from stratagem.cluster.waiting import Wait, listing
from stratagem.errors import ReplicaLost, ReplicaStalled, UsageError

log = logging.getLogger("stratagem")

Note = dict[str, object]

_FRAME = 1024  # bytes kept free in a note for what is written around it
_SPEAK = 5.0  # seconds until a waiting member says whom it waits for


class Rounds:
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

    def raise_if_departed(self) -> None:
        """Raise if anybody has left: for those who wait for everybody."""
        if self._departed:
            with self._changed:
                gone = [self._members[rank] for rank in sorted(self._departed)]
            raise _absent(gone)

    def gather(self, turn: int, limit: float, trouble: Callable[[], Trouble | None]) -> list[Note]:
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
