"""Forms a membership over TCP: the chief listens at its address, and the other tasks connect."""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from stratagem.cluster.acceptor import GREETING, Acceptor
from stratagem.cluster.failure import Member
from stratagem.cluster.handshake import (
    Stranger,
    WrongSecret,
    peer_name,
    prove,
    recv_note,
    send_note,
)
from stratagem.cluster.heartbeat import GIVE_UP, STALL
from stratagem.cluster.membership import OUTSIDE, Membership
from stratagem.cluster.sockets import connect, listen
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.cluster.waiting import FIRST, Wait, missing_error, reach, say_missing
from stratagem.errors import ClusterError, ReplicaMissing

log = logging.getLogger("stratagem")

UPDATE = 1.0  # seconds between two updates to members that wait
RETRY = 0.2  # seconds between two tries to connect
CONNECT = 2.0  # seconds for one try
REFUSALS = 3  # in a row before giving up: a chief that is being restarted may refuse once

#: seconds between two checks for arrivals, at first and later
_SOON, _PAUSE = 0.001, 0.02
_FIRST = 1.0  # seconds for which _SOON holds
_SEND = 1.0

_Arrival = tuple[socket.socket, dict[str, object]]


def form(
    spec: ClusterSpec,
    task: Task,
    *,
    secret: bytes,
    limit: float = 300.0,
    give_up: float = GIVE_UP,
) -> Membership:
    """Connect all tasks that train; ReplicaMissing names those that never came."""
    tasks = spec.training_tasks()
    members = tuple(Member(str(each), spec.address(each)) for each in tasks)
    if task not in tasks:
        raise ClusterError(f"{task} does not train, so it takes no part in the training's ranks")
    rank = tasks.index(task)
    if len(members) == 1:
        return Membership.alone(members[0])
    watch = partial(_refuse_servers, spec, secret)
    if rank == 0:
        listener = listen(members[0].where, members[0].name)
        sockets = Gathering(members, secret, limit, watch).gather(listener)
        return Membership.hub(members, sockets, give_up=give_up)
    sock = Visitor(members, rank, secret, limit, watch=watch).arrive()
    return Membership.spoke(members, rank, sock, give_up=give_up)


def _refuse_servers(spec: ClusterSpec, secret: bytes) -> None:
    """Refuse to wait for replicas where a task of the job serves parameters."""
    for address in spec.jobs.get("ps", ())[:1]:
        try:
            with connect(address, CONNECT) as sock:
                prove(sock, secret, limit=CONNECT)
        except OSError:
            return  # nobody of this job listens there
        raise ClusterError(
            f"give every task the same strategy: ps 0 at {address} serves parameters, as for a "
            "ParameterServerStrategy, and this task's strategy has them in replicas, which wait "
            "for each other."
        )


class Gathering:
    """The chief's side: gathers a connection to each member, and logs which are missing."""

    #: the lowest rank that connects
    _lowest = 1

    def __init__(
        self,
        members: Sequence[Member],
        secret: bytes,
        limit: float,
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        self._members = members
        self._secret = secret
        self._patience = Wait(limit, FIRST, watch)
        self._present: dict[int, socket.socket] = {}
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._open = True
        self._update = 0.0

    def gather(self, listener: socket.socket) -> dict[int, socket.socket]:
        """Return the connections by rank once all members are here; closes the listener."""
        door = Acceptor(listener, self._secret, self._greet, str(self._members[0]))
        door.open()
        try:
            return self.attend(door.close)
        finally:
            self._open = False
            door.close()
            self._turn_away_the_rest()

    def attend(self, before_go: Callable[[], object]) -> dict[int, socket.socket]:
        """Wait until all members are here, tell them to go, and return the connections."""
        done = False
        try:
            with selectors.DefaultSelector() as selector:
                while self._waits() or self._some_left(selector):
                    self._attend(selector)
            before_go()
            self._tell({"go": True, **self._summary()})
            done = True
            return dict(self._present)
        except ReplicaMissing as problem:
            self._tell({"failed": str(problem), "who": problem.who})
            raise
        finally:
            if not done:
                for conn in self._present.values():
                    conn.close()

    def _summary(self) -> dict[str, object]:
        return {"present": sorted(self._present)}

    def _attend(self, selector: selectors.BaseSelector) -> None:
        """Do one round: hang-ups, arrivals, and an update to members that wait."""
        pause = _SOON if self._patience.waited < _FIRST else _PAUSE
        for key, _ in selector.select(pause):
            self._left(selector, key.data)
        while not self._arrivals.empty():
            conn, hello = self._arrivals.get()
            before = dict(self._present)
            rank = self._admit(conn, hello)
            if rank is not None:
                if rank in before:  # its old connection has hung up
                    selector.unregister(before[rank])
                    before[rank].close()
                selector.register(conn, selectors.EVENT_READ, rank)
        missing = self._missing()
        if missing and self._patience.over:
            raise missing_error([self._members[rank] for rank in missing], self._patience.waited)
        self._say(missing)
        if time.monotonic() >= self._update:
            self._update = time.monotonic() + UPDATE
            self._tell({"missing": missing})

    def _some_left(self, selector: selectors.BaseSelector) -> bool:
        """Whether a waiting member has hung up just now."""
        gone = selector.select(0)
        for key, _ in gone:
            self._left(selector, key.data)
        return bool(gone)

    def _say(self, missing: Sequence[int]) -> None:
        say_missing([self._members[rank] for rank in missing], self._patience)

    def _waits(self) -> bool:
        return bool(self._missing())

    def _missing(self) -> list[int]:
        ranks = range(self._lowest, len(self._members))
        return [rank for rank in ranks if rank not in self._present]

    def _greet(self, conn: socket.socket) -> None:
        """Receive the hello of a peer that has proved the secret, on its own thread."""
        try:
            hello = recv_note(conn, limit=GREETING)
        except OSError as problem:
            log.warning("refused a connection from %s: %s", peer_name(conn), problem)
            conn.close()
            return
        self._arrivals.put((conn, hello))
        if not self._open:
            self._turn_away_the_rest()

    def _turn_away_the_rest(self) -> None:
        while not self._arrivals.empty():
            try:
                self._arrivals.get(block=False)[0].close()
            except queue.Empty:
                return

    def _admit(self, conn: socket.socket, hello: Mapping[str, object]) -> int | None:
        """Admit a member, or refuse it with a sentence."""
        rank = hello.get("rank")
        reason = self._objection(hello, conn)
        try:
            if reason is None and isinstance(rank, int):
                send_note(conn, {"missing": self._missing()}, limit=_SEND)
                self._present[rank] = conn
                return rank
            if hello.get("purpose") == "train":
                log.warning("refused %s: %s", peer_name(conn), reason)
            send_note(conn, {"refused": reason, "training": True}, limit=_SEND)
        except OSError as problem:
            log.warning("%s hung up: %s", peer_name(conn), problem)
        conn.close()
        return None

    def _stranger(self, hello: Mapping[str, object]) -> str | None:
        """Return why a peer that knows the secret is none of the members, or None."""
        if hello.get("purpose") != "train":
            return "the training itself is listening here, waiting for its tasks"
        if hello.get("members") != [[member.name, member.where] for member in self._members]:
            return (
                f"its cluster is not the chief's, which has {len(self._members)} training tasks: "
                "give every task the same cluster"
            )
        rank = hello.get("rank")
        if not isinstance(rank, int) or not self._lowest <= rank < len(self._members):
            return f"there is no rank {rank!r} to take, among {len(self._members)} training tasks"
        return None

    def _objection(self, hello: Mapping[str, object], conn: socket.socket) -> str | None:
        """Return why a peer of the job cannot join as the member it claims to be, or None."""
        stranger, rank = self._stranger(hello), hello.get("rank")
        if stranger is not None or not isinstance(rank, int):
            return stranger
        if rank in self._present and not _hung_up(self._present[rank]):
            return (
                f"{self._members[rank].name} is already here, from "
                f"{peer_name(self._present[rank])}: two processes were started as the same task. "
                "Give each its own task index"
            )
        return None

    def _left(self, selector: selectors.BaseSelector, rank: int) -> None:
        """Wait anew for a member that hung up; members send nothing while they wait."""
        conn = self._present.pop(rank)
        selector.unregister(conn)
        conn.close()
        log.warning("%s left before everybody was here", self._members[rank])

    def _tell(self, note: Mapping[str, object]) -> None:
        for conn in self._present.values():
            try:
                send_note(conn, note, limit=_SEND)
            except OSError:
                continue  # the selector, or later the membership, notices


class JobRuns(Exception):
    """The job runs already; a task can join once it has come to the same call."""


class Visitor:
    """A member's side: connects to the chief, and waits until all members are there."""

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        secret: bytes,
        limit: float,
        more: Mapping[str, object] | None = None,
        hub: Member | None = None,
        hurry: Callable[[], bool] | None = None,
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        """`more` is sent with the hello.

        `hub` is connected to instead of the first member, and learns when `hurry` becomes true.
        """
        self._members = members
        self._hub, self._hurry = hub, hurry
        self._host = 0 if hub is None else OUTSIDE
        self._rank = rank
        self._more = dict(more or {})
        self._secret = secret
        self._limit = limit
        self._patience = Wait(limit, FIRST, watch)
        self._refusals = 0
        #: the ranks of this generation's members, and its number, once the chief has sent them
        self.present: list[int] = []
        self.generation: object = None

    def arrive(self) -> socket.socket:
        """Return the connection to the chief once it says that all members are here."""
        (sock,) = reach([self._who(self._host)], self._call_on, self._patience)
        return sock

    def _call_on(self, hub: Member) -> socket.socket:
        """Try once to connect and to wait there."""
        sock = connect(hub.where, min(CONNECT, self._patience.left + RETRY))
        try:
            return self._enter(sock)
        except (Stranger, WrongSecret) as problem:
            sock.close()
            self._refusals += 1
            if self._refusals >= REFUSALS:
                raise
            time.sleep(1.0)
            raise ConnectionError("it refused us") from problem
        except BaseException:
            sock.close()
            raise

    def _enter(self, sock: socket.socket) -> socket.socket:
        """Prove the secret, send the hello, and wait until the chief says go."""
        prove(sock, self._secret, limit=GREETING)
        self._refusals = 0
        members = [[member.name, member.where] for member in self._members]
        hello = {"purpose": "train", "rank": self._rank, "members": members, **self._more}
        hurried = self._hurry is not None and self._hurry()
        send_note(sock, hello | {"hurry": hurried} if self._hurry else hello, GREETING)
        missing, heard = [self._host], time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while True:
                if selector.select(RETRY):
                    note = recv_note(sock, limit=GREETING)
                    if note.get("go"):
                        count, told = len(self._members), note.get("present")
                        self.present = _ranks(told, count) if self._hub is None else _listed(told)
                        self.generation = note.get("generation")
                        return sock
                    missing, heard = self._hear(note), time.monotonic()
                if self._hurry is not None and self._hurry() and not hurried:
                    raise ConnectionError("this task comes again, in a hurry")
                silent = time.monotonic() - heard > STALL
                # The chief gives up at about the same time, and knows best who is missing.
                extra = 0.0 if silent else GREETING
                self._look_around(sorted({self._host, *missing}) if silent else missing, extra)

    def _hear(self, note: dict[str, object]) -> list[int]:
        """Return the ranks that the chief misses; raise if it refused or gave up."""
        if "failed" in note:
            raise ReplicaMissing(str(note["failed"]), str(note.get("who", "")))
        if "refused" in note:
            chief = self._who(self._host)
            raise ClusterError(
                f"{chief} refused {self._members[self._rank].name}: {note['refused']}"
            )
        if "later" in note:
            raise JobRuns
        if "again" in note:
            raise ConnectionError(str(note["again"]))
        missing = note.get("missing")
        if not isinstance(missing, list):
            return [self._host]
        known = range(len(self._members))
        # This task itself is here, even if the chief wrote this before it knew.
        return [rank for rank in missing if rank in known and rank != self._rank]

    def _look_around(self, missing: Sequence[int], extra: float) -> None:
        """Log which members are missing, or raise after the limit and `extra` seconds."""
        members = [self._who(rank) for rank in missing]
        if self._patience.waited >= self._limit + extra:
            members = members or [self._who(self._host)]
            raise missing_error(members, self._patience.waited)
        say_missing(members, self._patience)

    def _who(self, rank: int) -> Member:
        return self._hub if self._hub and rank == OUTSIDE else self._members[rank]


def _hung_up(conn: socket.socket) -> bool:
    """Whether a peer that sends nothing has closed its connection."""
    try:
        return not conn.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listed(told: object) -> list[int]:
    """Return ranks in the hub's order."""
    return [rank for rank in told if isinstance(rank, int)] if isinstance(told, list) else []


def _ranks(told: object, count: int) -> list[int]:
    """Return ranks, the chief's first; all of them if the chief sent none."""
    if not isinstance(told, list):
        return list(range(count))
    return [0, *sorted({rank for rank in told if rank in range(1, count)})]
