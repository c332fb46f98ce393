"""The generations of an elastic job, numbered from outside of it: by `stratagem run`.

No task is needed for the job to go on, the first one no more than others:

    generation 0: worker 0, 1, 2      worker 0 dies
    generation 1: worker 1, 2         worker 1 is the chief now: it has what all had
    generation 2: worker 1, 2, 0      worker 0 is started again, and joins behind the others

Those who have worked together stand first, in their old order, so that the chief, whose state
everybody takes, is never one that has only come.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from stratagem.cluster.failure import Member
from stratagem.cluster.generations import CALL, LAUNCHER, Door
from stratagem.cluster.handshake import send_note
from stratagem.cluster.heartbeat import GIVE_UP
from stratagem.cluster.membership import OUTSIDE, Membership
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.waiting import FIRST, Wait
from stratagem.errors import ReplicaMissing

log = logging.getLogger("stratagem")

_LOOK = 1.0  # seconds between two looks whether the launcher has closed it
_LIMIT = 300.0  # seconds to wait for tasks, until one of them says how long


class HubMembership(Membership):
    """A generation as the hub sees it, which is no member itself."""

    def await_end(self, seconds: float) -> bool:
        """Wait for trouble, or for all members to leave; returns whether one of them has come."""
        everybody = set(range(len(self.members)))
        with self._changed:
            over = self._changed.wait_for(
                lambda: self._trouble or self._rounds.departed() >= everybody, seconds
            )
        return bool(over)

    def has_lost(self, name: str) -> bool:
        """Whether a member has died, fallen silent or come too late."""
        return name in self._gone


class GenerationHub(Door):
    """A port on this machine, and a thread that makes one generation after another."""

    _lowest = 0

    def __init__(self, spec: ClusterSpec, secret: bytes) -> None:
        tasks = spec.training_tasks()
        members = [Member(str(each), spec.address(each)) for each in tasks]
        port = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{port.getsockname()[1]}"
        self._me = Member(LAUNCHER, self.address)
        self._hellos: dict[int, Mapping[str, object]] = {}
        #: the generation that works, or has worked last: its number, and its ranks in their order
        self._number = 0
        self._order: list[int] = []
        self._knocked = threading.Event()
        self._limit, self._give_up = _LIMIT, GIVE_UP
        #: names of all who have taken part
        self._known: frozenset[str] = frozenset()
        #: of these, who was lost and has not come back; and if that was a chief between two calls
        self._lost: set[str] = set()
        self._needed: str | None = None
        super().__init__(members, secret, 1, port)
        self._thread = threading.Thread(target=self._run, name="stratagem-hub", daemon=True)
        self._thread.start()

    def does_without(self, name: str) -> bool:
        """Whether this task has taken part in an elastic job, which goes on without it.

        Not without the chief while others may not join: then it does what none of them would. Who
        asks may know of an end before its last words are read here.
        """
        until = time.monotonic() + _LOOK
        while self.has(name) and name not in self._lost and time.monotonic() < until:
            time.sleep(0.005)
        is_chief = bool(self._order) and self._members[self._order[0]].name == name
        needed = name == self._needed or (is_chief and self._call is None)
        return name in self._known and not needed

    def took_part(self, name: str) -> bool:
        """Whether this task was of any generation."""
        return name in self._known

    def has(self, name: str) -> bool:
        """Whether this task is of the generation that works, or has worked last."""
        return name in (self._members[rank].name for rank in self._order)

    def close(self) -> None:
        super().close()
        self._knocked.set()
        self._thread.join(2 * _LOOK)

    # --- one generation after another -----------------------------------------------------------

    def _run(self) -> None:
        try:
            old: HubMembership | None = None
            while self._open:
                old = self._next(old)
        except Exception:
            log.exception("the launcher says no more who belongs to the job")
            super().close()

    def _next(self, old: HubMembership | None) -> HubMembership | None:
        """Gather a generation and see it to its end; None if nobody is left of it."""
        while old is None and self._arrivals.empty() and self._open:
            self._knocked.wait(_LOOK)
            self._knocked.clear()
        with self._knocks:
            self._current = None
            self._first, self._hellos = old is None, {}
            self._call = None if old is None else self._call
        everybody = frozenset(member.name for member in self._members)
        expected = everybody if old is None else old.still_here
        try:
            sockets = self.gather(expected, old, self._limit, None)
        except ReplicaMissing:
            sockets = {}
        if old is not None:
            old.leave(wait=False)
        if not sockets or not self._open:
            return None
        members = [self._members[rank] for rank in self._order]
        mine = {place: sockets[rank] for place, rank in enumerate(self._order)}
        made = HubMembership(members, OUTSIDE, mine, self._give_up, self._me)
        made.board.on_word(self._hear_word)
        here = {member.name for member in members}
        self._known |= here
        self._lost -= here
        self._needed = None if self._needed in here else self._needed
        self.serve(made)
        while self._open and not made.await_end(_LOOK):
            pass
        if self._call is None and made.has_lost(members[0].name):
            self._needed = members[0].name
        self._lost |= {member.name for member in members if made.has_lost(member.name)}
        if made.trouble is None or not self._open:
            made.leave()
            return None
        return made

    def _hear_word(self, key: str, word: str) -> None:
        if key.startswith(CALL):
            self.open(word or None)

    # --- who comes ------------------------------------------------------------------------------

    def _greet(self, conn: socket.socket) -> None:
        super()._greet(conn)
        self._knocked.set()

    def _say(self, missing: Sequence[int]) -> None:
        """Those who wait say it themselves."""

    def _waits(self) -> bool:
        return self._open and super()._waits()

    def _missing(self) -> list[int]:
        nobody = self._old is not None and not self._old.still_here
        return [] if nobody and not self._stayed() else super()._missing()

    def _objection(self, hello: Mapping[str, object], conn: socket.socket) -> str | None:
        self._gathered_for = None if self._first else _call(hello)  # compared in `_settle`
        return super()._objection(hello, conn)

    def _admit(self, conn: socket.socket, hello: Mapping[str, object]) -> int | None:
        if self._comes_back_too_early(hello):
            with contextlib.suppress(OSError):
                send_note(conn, {"again": "the others are not through with the last job"}, 1.0)
            conn.close()
            return None
        rank = super()._admit(conn, hello)
        if rank is not None:
            if not self._hellos:
                self._limit = _number(hello, "limit", _LIMIT)
                self._patience = Wait(self._limit, first=FIRST)
            self._hellos[rank] = hello
            self._least = int(_number(hello, "least", 1))
            self._give_up = _number(hello, "give_up", GIVE_UP)
            self.hurry = self._hurried
        return rank

    def _comes_back_too_early(self, hello: Mapping[str, object]) -> bool:
        """Whether a task begins anew whose last strategy others still work with."""
        working, rank = self._current, hello.get("rank")
        if (
            not isinstance(working, HubMembership)
            or _call(hello) is not None
            or not isinstance(rank, int)
        ):
            return False
        who = self._members[rank] if 0 <= rank < len(self._members) else None
        return who is not None and who in working.members and not working.has_lost(who.name)

    def _hurried(self) -> bool:
        return any(self._hellos[rank].get("hurry") is True for rank in self._present)

    def _stayed(self) -> list[int]:
        """The ranks of those here who come from the last generation, in their order."""
        return [
            rank
            for rank in self._order
            if rank in self._present and self._hellos[rank].get("generation") == self._number
        ]

    def _summary(self) -> dict[str, object]:
        """Settle who takes part: those who have come to the same call as the chief."""
        if not self._first:
            stayed = self._stayed()
            call = _call(self._hellos[stayed[0]]) if stayed else None
            for rank in list(self._present):
                if not stayed or _call(self._hellos[rank]) != call:
                    self._refuse(rank, call)
        order = self._stayed() if not self._first else []
        order += sorted(self._present.keys() - set(order))
        self._order = order or self._order  # if nobody came, the last one to work has ended
        self._number += 1
        return {"present": order, "generation": self._number}

    def _refuse(self, rank: int, call: str | None) -> None:
        reason = (
            "nobody is left who has the state of the training; start the job again"
            if call is None
            else f"the job is in {call}, and this task has come to {_call(self._hellos[rank])}: a "
            "task can join while the others are in the same call as its script"
        )
        log.warning("refused %s: %s", self._members[rank], reason)
        conn = self._present.pop(rank)
        with contextlib.suppress(OSError):
            send_note(conn, {"refused": reason}, limit=1.0)
        conn.close()


def _call(hello: Mapping[str, object]) -> str | None:
    call = hello.get("call")
    return call if isinstance(call, str) else None


def _number(hello: Mapping[str, object], key: str, default: float) -> float:
    value = hello.get(key)
    return float(value) if isinstance(value, int | float) and value > 0 else default
