"""An elastic job: memberships one after another, as tasks leave and join.

    generation 0: worker 0, 1, 2      worker 2 dies: everybody who waits is told, and comes back
    generation 1: worker 0, 1         worker 2 is started again and knocks: the same
    generation 2: worker 0, 1, 2

The chief's port stays open for as long as the job runs. Only the chief decides who belongs to a
generation; a task that was cut off and comes back finds a newer one, and joins as if it were new.
So there are never two groups that both go on.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from stratagem.cluster.acceptor import Acceptor
from stratagem.cluster.failure import Failure, Member
from stratagem.cluster.handshake import send_note
from stratagem.cluster.heartbeat import GIVE_UP
from stratagem.cluster.membership import Membership
from stratagem.cluster.rendezvous import Gathering, JobRuns, Visitor
from stratagem.cluster.sockets import listen
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.cluster.waiting import FIRST, Wait, missing_error

log = logging.getLogger("stratagem")

#: seconds for the first task to come back to a chief whose connection was lost: cut off, or dead?
RETURN = 10.0


class Generations:
    """One task of an elastic job; `first` and `next` return the membership to work in."""

    def __init__(
        self,
        spec: ClusterSpec,
        task: Task,
        *,
        secret: bytes,
        limit: float,
        least: int = 1,
        give_up: float = GIVE_UP,
    ) -> None:
        tasks = spec.training_tasks()
        self._members = tuple(Member(str(each), spec.address(each)) for each in tasks)
        self._rank = tasks.index(task)
        self._secret, self._limit, self._give_up = secret, limit, give_up
        self._door: _Door | None = None
        if self._rank == 0:
            self._door = _Door(self._members, secret, least)

    def first(self) -> Membership | None:
        """Wait for all tasks of the cluster; after the limit, those who are here are enough.

        None if the job runs already: `join` takes part in it.
        """
        if self._door is None:
            try:
                return self._visit(self._limit)
            except JobRuns:
                return None
        everybody = frozenset(member.name for member in self._members)
        return self._hub(self._door.gather(everybody, None, self._limit, None))

    def join(self, call: str) -> Membership:
        """Take part in a job that runs, in the call that it is in."""
        return self._visit(self._limit, call)

    def open(self, call: str | None) -> None:
        """On the chief: tasks may join while this call runs; None when it is over."""
        if self._door is not None:
            self._door.open(call)

    def next(
        self, old: Membership, call: str, hurry: Callable[[], bool] = lambda: False
    ) -> Membership:
        """Come together again after trouble in `old`, which is left.

        `hurry`: whether those who are still here are enough, fewer than `least` though they be.
        """
        if self._door is not None:
            self._door.hurry = hurry
            sockets = self._door.gather(old.still_here, old, self._limit, call)
            old.leave()
            return self._hub(sockets)
        trouble = old.trouble
        lost = trouble is not None and trouble.rank == 0 and trouble.kind in ("died", "stalled")
        try:
            return self._visit(RETURN if lost else self._limit, call)
        finally:
            old.leave()

    def _hub(self, sockets: dict[int, socket.socket]) -> Membership:
        assert self._door is not None
        ranks = [0, *sorted(sockets)]
        members = [self._members[rank] for rank in ranks]
        mine = {ranks.index(rank): sock for rank, sock in sockets.items()}
        made = Membership(members, 0, mine, self._give_up)
        self._door.serve(made)
        return made

    def _visit(self, limit: float, call: str | None = None) -> Membership:
        visitor = Visitor(self._members, self._rank, self._secret, limit, {"call": call})
        sock = visitor.arrive()
        members = [self._members[rank] for rank in visitor.present]
        rank = visitor.present.index(self._rank)
        return Membership.spoke(members, rank, sock, give_up=self._give_up)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._door is not None:
            self._door.close()


class _Door(Gathering):
    """The chief's port: whoever knocks while a generation works makes it give way to the next."""

    def __init__(self, members: Sequence[Member], secret: bytes, least: int) -> None:
        super().__init__(members, secret, 0.0)
        self._least = least
        self.hurry: Callable[[], bool] = lambda: False
        self._expected: frozenset[str] = frozenset()
        self._old: Membership | None = None
        self._gathered_for: str | None = None
        self._knocks = threading.Lock()
        #: the generation that works now; None while the next one gathers
        self._current: Membership | None = None
        #: what is being done, if others may join in it
        self._call: str | None = None
        self._first = True
        port = listen(members[0].where, members[0].name)
        self._acceptor = Acceptor(port, secret, self._greet, str(members[0]))
        self._acceptor.open()

    def gather(  # type: ignore[override]
        self, expected: frozenset[str], old: Membership | None, limit: float, call: str | None
    ) -> dict[int, socket.socket]:
        """Return the connections, by rank in the cluster, of those who make up a generation.

        `expected` are waited for unless `old` says that they are gone, or for as long as `limit`
        lasts. They do `call` together; at the job's start their scripts have only begun.
        """
        with self._knocks:
            self._current = None
        self._expected, self._old, self._gathered_for = expected, old, call
        self._present = {}
        self._patience = Wait(limit, first=FIRST)
        return self.attend(lambda: None)

    def _waits(self) -> bool:
        return bool(self._missing()) or not self._arrivals.empty()

    def _missing(self) -> list[int]:
        names = self._expected if self._old is None else self._expected & self._old.still_here
        late = [r for r, m in enumerate(self._members) if r and m.name in names]
        missing = [rank for rank in late if rank not in self._present]
        if missing and self._patience.over and self._old is None:
            missing = []  # those who are here are enough, unless they are too few
        if not missing and 1 + len(self._present) < self._least and not self.hurry():
            missing = [r for r in range(1, len(self._members)) if r not in self._present]
            if self._patience.over:
                members = [self._members[rank] for rank in missing]
                raise missing_error(members, self._patience.waited)
        return missing

    def _objection(self, hello: Mapping[str, object], conn: socket.socket) -> str | None:
        found = super()._objection(hello, conn)
        if found is not None or hello.get("call") == self._gathered_for:
            return found
        if self._first:
            return "the job was started again, and this task is one of before: start it again, too"
        return (
            f"the job is in {self._gathered_for}, and this task has come to {hello.get('call')}: "
            "a task can join while the others are in the same call as its script"
        )

    def _admit(self, conn: socket.socket, hello: Mapping[str, object]) -> int | None:
        """One whose script has only begun is told to come back when it has something to do."""
        if self._first or hello.get("call") is not None:
            return super()._admit(conn, hello)
        with contextlib.suppress(OSError):
            send_note(conn, {"later": True}, limit=1.0)
        conn.close()
        return None

    def _greet(self, conn: socket.socket) -> None:
        super()._greet(conn)
        self._attend_while_working()

    def serve(self, membership: Membership) -> None:
        """This generation works from now on."""
        with self._knocks:
            self._current, self._first = membership, False
        self._attend_while_working()

    def open(self, call: str | None) -> None:
        """Whoever knocks while this call runs interrupts it."""
        with self._knocks:
            self._call = call
        self._attend_while_working()

    def _attend_while_working(self) -> None:
        """Send those away who have only begun; others make the generation give way."""
        with self._knocks:
            working = self._current
            if working is None:
                return
            waiting = []
            while not self._arrivals.empty():
                conn, hello = self._arrivals.get()
                if hello.get("call") is None:
                    self._admit(conn, hello)
                else:
                    waiting.append((conn, hello))
            for each in waiting:
                self._arrivals.put(each)
            if not waiting or self._call is None:
                return
            self._current = None
        rank = waiting[0][1].get("rank")
        known = isinstance(rank, int) and 0 < rank < len(self._members)
        member = self._members[rank if known and isinstance(rank, int) else 0]
        working.announce(Failure(0, member, "joined", "it waits at the chief's port"))

    def close(self) -> None:
        self._open = False
        self._acceptor.close()
        self._turn_away_the_rest()
