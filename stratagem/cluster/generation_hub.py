"""Forms the generations of an elastic job in the launcher, `stratagem run`.

The job can go on without any of its tasks, the first one included:

    generation 0: worker 0, 1, 2      worker 0 dies
    generation 1: worker 1, 2         worker 1 is the chief now: it has the state
    generation 2: worker 1, 2, 0      worker 0 is started again, and joins as the last

Members of the last generation come first, in their old order, so that the chief, whose state all
replicas take, is never a new member.
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

_LOOK = 1.0  # seconds between two checks whether the launcher has closed the hub
_LIMIT = 300.0  # seconds to wait for tasks, until one of them sends its own limit


class HubMembership(Membership):
    """The hub's view of a generation, of which it is no member."""

    def await_end(self, seconds: float) -> bool:
        """Wait for trouble, or until all members have left; False after a timeout."""
        everybody = set(range(len(self.members)))
        with self._changed:
            over = self._changed.wait_for(
                lambda: self._trouble or self._rounds.departed() >= everybody, seconds
            )
        return bool(over)

    def has_lost(self, name: str) -> bool:
        """Whether a member has died, stalled or been too late."""
        return name in self._gone

    @property
    def is_done(self) -> bool:
        """Whether a member has left of its own accord."""
        with self._changed:
            return bool(self._rounds.departed())


class GenerationHub(Door):
    """A Door on this machine, whose own thread forms one generation after another.

    Unlike a chief, the hub is no member: all ranks connect to it, and the settings come with their
    hellos (`_admit`). It learns who is the chief, and which call the others must be in, only when
    all are there (`_summary`).
    """

    _lowest = 0

    def __init__(self, spec: ClusterSpec, secret: bytes) -> None:
        tasks = spec.training_tasks()
        members = [Member(str(each), spec.address(each)) for each in tasks]
        port = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{port.getsockname()[1]}"
        self._me = Member(LAUNCHER, self.address)
        self._hellos: dict[int, Mapping[str, object]] = {}
        #: number and ranks, in order, of the generation that works or worked last
        self._number = 0
        self._order: list[int] = []
        self._arrived = threading.Event()
        self._limit, self._give_up = _LIMIT, GIVE_UP
        #: names of all tasks that have taken part
        self._known: frozenset[str] = frozenset()
        #: those that were lost and have not come back
        self._lost: set[str] = set()
        #: a chief that was lost between two calls, without which the job cannot go on
        self._needed: str | None = None
        super().__init__(members, secret, 1, port)
        self._thread = threading.Thread(target=self._run, name="stratagem-hub", daemon=True)
        self._thread.start()

    def does_without(self, name: str) -> bool:
        """Whether an elastic job, in which this task took part, goes on without it.

        It needs the chief between two calls, when only the chief does what follows. The caller may
        know of a task's end before its last notes are read here.
        """
        until = time.monotonic() + _LOOK
        while self.has(name) and name not in self._lost and time.monotonic() < until:
            time.sleep(0.005)
        is_chief = bool(self._order) and self._members[self._order[0]].name == name
        needed = name == self._needed or (is_chief and self._call is None)
        return name in self._known and not needed

    def took_part(self, name: str) -> bool:
        """Whether this task was in any generation."""
        return name in self._known

    def has(self, name: str) -> bool:
        """Whether this task is in the generation that works or worked last."""
        return name in (self._members[rank].name for rank in self._order)

    def has_lost(self, name: str) -> bool:
        """Whether this task was lost, and has not come back."""
        return name in self._lost

    def close(self) -> None:
        super().close()
        self._arrived.set()
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
        """Form a generation and wait for its end; returns it if members are left."""
        while old is None and self._arrivals.empty() and self._open:
            self._arrived.wait(_LOOK)
            self._arrived.clear()
        with self._lock:
            self._working = None
            self._first, self._hellos = old is None, {}
            self._call = None if old is None else self._call
        all_names = frozenset(member.name for member in self._members)
        expected = all_names if old is None else old.still_here
        try:
            sockets = self.gather_next(expected, old, self._limit, None)
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
        self._arrived.set()

    def _say(self, missing: Sequence[int]) -> None:
        """Log nothing: the waiting tasks log it themselves."""

    def _waits(self) -> bool:
        return self._open and super()._waits()

    def _missing(self) -> list[int]:
        old = self._old
        if old is None or old.still_here or self._stayed():
            return super()._missing()
        # of a job that is done the launcher ends whoever comes too late
        done = isinstance(old, HubMembership) and old.is_done and not self._patience.over
        return [r for r in range(len(self._members)) if done and r not in self._present]

    def _wrong_call(self, hello: Mapping[str, object]) -> str | None:
        return super()._wrong_call(hello) if self._first else None  # left to `_summary`

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
        """Whether a task starts anew while its generation still works with its last strategy."""
        working, rank = self._working, hello.get("rank")
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
        """Return the ranks that come from the last generation, in their order."""
        return [
            rank
            for rank in self._order
            if rank in self._present and self._hellos[rank].get("generation") == self._number
        ]

    def _summary(self) -> dict[str, object]:
        """Refuse tasks that are in another call than the chief, and number the generation."""
        if not self._first:
            stayed = self._stayed()
            call = _call(self._hellos[stayed[0]]) if stayed else None
            for rank in list(self._present):
                if not stayed or _call(self._hellos[rank]) != call:
                    self._refuse(rank, call)
        order = self._stayed() if not self._first else []
        order += sorted(self._present.keys() - set(order))
        self._order = order or self._order  # if no task came, keep that of the last generation
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
