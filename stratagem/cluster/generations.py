"""An elastic job: memberships one after another, as tasks leave and join.

    generation 0: worker 0, 1, 2      worker 2 dies: waits in the other tasks raise, they reconnect
    generation 1: worker 0, 1         worker 2 is started again and connects: the same happens
    generation 2: worker 0, 1, 2

The chief's port stays open for as long as the job runs. Only the chief decides which tasks belong
to a generation; a task that was cut off and returns finds a newer one, and joins as a new task
does. So two groups never go on at the same time.

Under `stratagem run` the launcher has that port and decides (generation_hub.py). Then the chief may
die like any other task; the first task that is left becomes the chief.
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

#: seconds to reconnect to a chief whose connection was lost, which may be dead
RETURN = 10.0
#: prefix of the keys under which the chief publishes the call that tasks may join to a hub
CALL = "call/"
_FLUSH = 1.0  # seconds to send the end of a call
#: the name of a hub that is no member
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
        """`hub` is the address of a GenerationHub, if the launcher has one."""
        tasks = spec.training_tasks()
        self._members = tuple(Member(str(each), spec.address(each)) for each in tasks)
        self._rank = tasks.index(task)
        self._secret, self._limit, self._give_up = secret, limit, give_up
        self._door: Door | None = None
        self._hub = None if hub is None else Member(LAUNCHER, hub)
        #: settings that a hub needs, and this task's last generation
        self._terms: dict[str, object] = {"least": least, "limit": limit, "give_up": give_up}
        self._number: object = None
        self._current: Membership | None = None
        self._calls = itertools.count()
        if self._rank == 0 and hub is None:
            port = listen(self._members[0].where, self._members[0].name)
            self._door = Door(self._members, secret, least, port)

    @property
    def outlives_the_chief(self) -> bool:
        """Whether the chief may die like any other task."""
        return self._hub is not None

    def first(self) -> Membership | None:
        """Wait for all tasks of the cluster, or after the limit for `least` of them.

        None if the job runs already; then call `join`.
        """
        if self._door is None:
            try:
                return self._visit(self._limit)
            except JobRuns:
                return None
        all_names = frozenset(member.name for member in self._members)
        return self._as_hub(self._door.gather_next(all_names, None, self._limit, None))

    def join(self, call: str) -> Membership:
        """Join a running job, which is in `call`."""
        return self._visit(self._limit, call)

    def open(self, call: str | None) -> None:
        """On the chief: let tasks join during this call; None when it is over."""
        if self._door is not None:
            self._door.open(call)
        elif self._hub is not None and self._current is not None and self._current.rank == 0:
            # after a call only the chief does what follows, so the hub must know of its end
            within = _FLUSH if call is None else 0.0
            key = f"{CALL}{self._rank}/{next(self._calls)}"
            self._current.publish(key, call or "", within=within)

    def next(
        self, old: Membership, call: str, hurry: Callable[[], bool] = lambda: False
    ) -> Membership:
        """Leave `old`, in which there was trouble, and form the next generation.

        `hurry`: whether fewer than `least` members are enough.
        """
        if self._door is not None:
            self._door.hurry = hurry
            sockets = self._door.gather_next(old.still_here, old, self._limit, call)
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
        """Close the chief's port."""
        if self._door is not None:
            self._door.close()


def _say_who_joins(old: Membership, members: Sequence[Member]) -> None:
    """Log the members that join, but for one that the trouble has named."""
    told = old.trouble.member if old.trouble and old.trouble.kind == "joined" else None
    for member in members:
        if member != told and member.name not in old.still_here:
            log.warning("%s joins the job", member)


class Door(Gathering):
    """The chief's port; a task that arrives while a generation works makes it give way to the next.

    gathering   `gather_next` runs in its caller's thread and alone takes arrivals
         | serve(membership)
    working     each arrival is handled in its own thread, under the lock: a stranger, or a task
         |      at the start of its script, is sent away; others wait in the queue
         | open(call), and a task waits: the membership announces "joined", its members raise,
         v      and the chief calls `gather_next`
    gathering
    """

    def __init__(
        self, members: Sequence[Member], secret: bytes, least: int, port: socket.socket
    ) -> None:
        super().__init__(members, secret, 0.0)
        self._least = least
        self.hurry: Callable[[], bool] = lambda: False
        #: the arguments of `gather_next`
        self._expected: frozenset[str] = frozenset()
        self._old: Membership | None = None
        self._gathering_call: str | None = None
        self._lock = threading.Lock()
        #: the generation that works now; None while the next one gathers
        self._working: Membership | None = None
        #: the call that the generation is in, if tasks may join it
        self._call: str | None = None
        #: whether no generation has worked yet
        self._first = True
        where = str(members[0]) if self._lowest else LAUNCHER
        self._acceptor = Acceptor(port, secret, self._greet, where)
        self._acceptor.open()

    def gather_next(
        self, expected: frozenset[str], old: Membership | None, limit: float, call: str | None
    ) -> dict[int, socket.socket]:
        """Return the connections of the next generation, by rank in the cluster.

        Waits for `expected`, but not for those that `old` knows to be gone, and not longer than
        `limit`. The members are in `call`, or at the start of their scripts if it is None.
        """
        with self._lock:
            self._working = None
        self._expected, self._old, self._gathering_call = expected, old, call
        self._present = {}
        self._patience = Wait(limit, first=FIRST)
        return self.attend(lambda: None)

    def _waits(self) -> bool:
        return bool(self._missing()) or not self._arrivals.empty()

    def _missing(self) -> list[int]:
        """Return the ranks to wait for: those expected, then any that make up `least`."""
        names = self._expected if self._old is None else self._expected & self._old.still_here
        absent = [r for r in range(self._lowest, len(self._members)) if r not in self._present]
        missing = [rank for rank in absent if self._members[rank].name in names]
        if self._patience.over and self._old is None:
            missing = []  # at the job's start `least` members are enough after the limit
        here = self._lowest + len(self._present)  # the chief itself does not connect
        if missing or here >= self._least or self.hurry():
            return missing
        if self._patience.over:
            members = [self._members[rank] for rank in absent]
            raise missing_error(members, self._patience.waited)
        return absent

    def _objection(self, hello: Mapping[str, object], conn: socket.socket) -> str | None:
        return super()._objection(hello, conn) or self._wrong_call(hello)

    def _wrong_call(self, hello: Mapping[str, object]) -> str | None:
        """Return why a task cannot join if it is in another call than the generation."""
        if hello.get("call") == self._gathering_call:
            return None
        if self._first:
            return "the job was started again, and this task is one of before: start it again, too"
        return (
            f"the job is in {self._gathering_call}, and this task has come to {hello.get('call')}: "
            "a task can join while the others are in the same call as its script"
        )

    def _admit(self, conn: socket.socket, hello: Mapping[str, object]) -> int | None:
        """Send a task that is at the start of its script away until it is in a call."""
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
        """Let this generation work."""
        with self._lock:
            self._working, self._first = membership, False
        self._attend_while_working()

    def open(self, call: str | None) -> None:
        """Let tasks interrupt this call to join; None when it is over."""
        with self._lock:
            self._call = call
        self._attend_while_working()

    def _attend_while_working(self) -> None:
        """Handle arrivals if a generation works: send them away, or have it give way."""
        with self._lock:
            working = self._working
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
            self._working = None
        rank = waiting[0][1]["rank"]
        assert isinstance(rank, int)
        working.announce(Failure(self._lowest - 1, self._members[rank], "joined", "it waits"))

    def close(self) -> None:
        self._open = False
        self._acceptor.close()
        self._turn_away_the_rest()
