"""An elastic job: memberships one after another, as tasks leave and join.

    generation 0: worker 0, 1, 2      worker 2 dies: everybody who waits is told, and comes back
    generation 1: worker 0, 1         worker 2 is started again and knocks: the same
    generation 2: worker 0, 1, 2

The chief's port stays open for as long as the job runs. Only the chief decides who belongs to a
generation; a task that was cut off and comes back finds a newer one, and joins as if it were new.
So there are never two groups that both go on.

Under `stratagem run` that port, and the decision, are the launcher's (generation_hub.py), and the
chief may die like any other: the first of those who are left is the chief then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from stratagem.cluster.acceptor import Acceptor
from stratagem.cluster.failure import Failure, Member
from stratagem.cluster.handshake import send_note
from stratagem.cluster.heartbeat import GIVE_UP
from stratagem.cluster.membership import OUTSIDE, Membership
from stratagem.cluster.rendezvous import Gathering, JobRuns, Visitor
from stratagem.cluster.sockets import listen
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.cluster.waiting import FIRST, Wait, missing_error

log = logging.getLogger("stratagem")

#: seconds for the first task to come back to a chief whose connection was lost: cut off, or dead?
RETURN = 10.0
#: under which the chief tells a hub outside what it does, if others may join in it
CALL = "call/"
_FLUSH = 1.0  # seconds for the end of a call to leave
#: what is said of a hub that is no member
LAUNCHER = "stratagem run"


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
        hub: str | None = None,
    ) -> None:
        """`hub` is the address of one outside of the job that says who belongs to a generation."""
        tasks = spec.training_tasks()
        self._members = tuple(Member(str(each), spec.address(each)) for each in tasks)
        self._rank = tasks.index(task)
        self._secret, self._limit, self._give_up = secret, limit, give_up
        self._door: Door | None = None
        self._hub = None if hub is None else Member(LAUNCHER, hub)
        #: what a hub outside must know, and which generation this task comes from
        self._terms: dict[str, object] = {"least": least, "limit": limit, "give_up": give_up}
        self._number: object = None
        self._current: Membership | None = None
        self._calls = itertools.count()
        if self._rank == 0 and hub is None:
            port = listen(self._members[0].where, self._members[0].name)
            self._door = Door(self._members, secret, least, port)

    @property
    def outlives_the_chief(self) -> bool:
        """Whether the chief may die like any other."""
        return self._hub is not None

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
        return self._as_hub(self._door.gather(everybody, None, self._limit, None))

    def join(self, call: str) -> Membership:
        """Take part in a job that runs, in the call that it is in."""
        return self._visit(self._limit, call)

    def open(self, call: str | None) -> None:
        """On the chief: tasks may join while this call runs; None when it is over."""
        if self._door is not None:
            self._door.open(call)
        elif self._hub is not None and self._current is not None and self._current.rank == 0:
            # what the chief does when it is over, nobody else would: the hub must know
            within = _FLUSH if call is None else 0.0
            key = f"{CALL}{self._rank}/{next(self._calls)}"
            self._current.publish(key, call or "", within=within)

    def next(
        self, old: Membership, call: str, hurry: Callable[[], bool] = lambda: False
    ) -> Membership:
        """Come together again after trouble in `old`, which is left.

        `hurry`: whether those who are still here are enough, fewer than `least` though they be.
        """
        if self._door is not None:
            self._door.hurry = hurry
            sockets = self._door.gather(old.still_here, old, self._limit, call)
            _say_who_joins(old, [self._members[rank] for rank in sorted(sockets)])
            old.leave(wait=False)
            return self._as_hub(sockets)
        trouble, host = old.trouble, 0 if self._hub is None else OUTSIDE
        lost = trouble is not None and trouble.rank == host and trouble.kind in ("died", "stalled")
        try:
            found = self._visit(RETURN if lost else self._limit, call, hurry)
            if self._hub is not None and found.rank == 0:
                _say_who_joins(old, found.members)
            return found
        finally:
            old.leave(wait=False)

    def _as_hub(self, sockets: dict[int, socket.socket]) -> Membership:
        assert self._door is not None
        ranks = [0, *sorted(sockets)]
        members = [self._members[rank] for rank in ranks]
        mine = {ranks.index(rank): sock for rank, sock in sockets.items()}
        made = Membership(members, 0, mine, self._give_up)
        self._door.serve(made)
        return made

    def _visit(
        self, limit: float, call: str | None = None, hurry: Callable[[], bool] = lambda: False
    ) -> Membership:
        more: dict[str, object] = {"call": call}
        hub = self._hub
        if hub is not None:
            more |= {**self._terms, "generation": self._number}
        asked = None if hub is None else hurry
        visitor = Visitor(self._members, self._rank, self._secret, limit, more, hub, asked)
        sock = visitor.arrive()
        members = [self._members[rank] for rank in visitor.present]
        rank = visitor.present.index(self._rank)
        self._number = visitor.generation
        if hub is None:
            return Membership.spoke(members, rank, sock, give_up=self._give_up)
        self._current = Membership(members, rank, {OUTSIDE: sock}, self._give_up, hub)
        return self._current

    def close(self) -> None:
        """Let nobody in any more."""
        if self._door is not None:
            self._door.close()


def _say_who_joins(old: Membership, members: Sequence[Member]) -> None:
    """Those of whom no trouble has told already."""
    told = old.trouble.member if old.trouble and old.trouble.kind == "joined" else None
    for member in members:
        if member != told and member.name not in old.still_here:
            log.warning("%s joins the job", member)


class Door(Gathering):
    """The chief's port: whoever knocks while a generation works makes it give way to the next."""

    def __init__(
        self, members: Sequence[Member], secret: bytes, least: int, port: socket.socket
    ) -> None:
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
        where = str(members[0]) if self._lowest else LAUNCHER
        self._acceptor = Acceptor(port, secret, self._greet, where)
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
        ranks = range(self._lowest, len(self._members))
        late = [r for r in ranks if self._members[r].name in names]
        missing = [rank for rank in late if rank not in self._present]
        if missing and self._patience.over and self._old is None:
            missing = []  # those who are here are enough, unless they are too few
        here = self._lowest + len(self._present)  # the chief itself does not come
        if not missing and here < self._least and not self.hurry():
            missing = [r for r in ranks if r not in self._present]
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
        """Send those away who have only begun or are strangers; others make the generation give
        way."""
        with self._knocks:
            working = self._current
            if working is None:
                return
            waiting = []
            while not self._arrivals.empty():
                conn, hello = self._arrivals.get()
                if hello.get("call") is None or self._stranger(hello) is not None:
                    self._admit(conn, hello)
                else:
                    waiting.append((conn, hello))
            for each in waiting:
                self._arrivals.put(each)
            if not waiting or self._call is None:
                return
            self._current = None
        rank = waiting[0][1]["rank"]
        assert isinstance(rank, int)
        working.announce(Failure(self._lowest - 1, self._members[rank], "joined", "it waits"))

    def close(self) -> None:
        self._open = False
        self._acceptor.close()
        self._turn_away_the_rest()
