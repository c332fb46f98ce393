"""Form a membership over TCP: the chief listens at its address, the others come to it."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence

from stratagem.cluster.dial import connect, listen
from stratagem.cluster.handshake import Stranger, WrongSecret, prove, recv_note, send_note
from stratagem.cluster.membership import Membership
from stratagem.cluster.pulse import GIVE_UP, STALL
from stratagem.cluster.reception import GREETING, Reception
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.cluster.trouble import Member
from stratagem.cluster.waiting import FIRST, Wait, missing_error, say_missing
from stratagem.errors import ClusterError, ReplicaMissing

RETRY = 0.2  # seconds between two tries to connect
CONNECT = 2.0  # seconds for one try
REFUSALS = 3  # in a row, until a refusal is no accident of a chief that is being restarted


def form(
    spec: ClusterSpec,
    task: Task,
    *,
    secret: bytes,
    limit: float = 300.0,
    give_up: float = GIVE_UP,
) -> Membership:
    """Wait until all tasks that train are here; ReplicaMissing names those that never came."""
    tasks = spec.training_tasks()
    members = tuple(Member(str(each), spec.address(each)) for each in tasks)
    if task not in tasks:
        raise ClusterError(f"{task} does not train, so it takes no part in the training's ranks")
    rank = tasks.index(task)
    if len(members) == 1:
        return Membership.alone(members[0])
    if rank == 0:
        listener = listen(members[0].where, members[0].name)
        sockets = Reception(members, secret, limit).gather(listener)
        return Membership.hub(members, sockets, give_up=give_up)
    sock = _Visitor(members, rank, secret, limit).arrive()
    return Membership.spoke(members, rank, sock, give_up=give_up)


class _Visitor:
    """A member on its way to the chief."""

    def __init__(self, members: Sequence[Member], rank: int, secret: bytes, limit: float) -> None:
        self._members = members
        self._rank = rank
        self._secret = secret
        self._limit = limit
        self._patience = Wait(limit, first=FIRST)
        self._refusals = 0

    def arrive(self) -> socket.socket:
        """Return the connection to the chief once the chief says that all are here."""
        while True:
            try:
                sock = connect(self._members[0].where, min(CONNECT, self._patience.left + RETRY))
                try:
                    return self._enter(sock)
                except BaseException:
                    sock.close()
                    raise
            except (Stranger, WrongSecret):
                self._refusals += 1
                if self._refusals >= REFUSALS:
                    raise
                why, pause = "it refused us", 1.0
            except OSError as problem:
                why, pause = str(problem), RETRY
            self._look_around([0], why)
            time.sleep(pause)

    def _enter(self, sock: socket.socket) -> socket.socket:
        """Prove, say who we are, and wait inside for the others."""
        prove(sock, self._secret, server=False, limit=GREETING)
        self._refusals = 0
        members = [[member.name, member.where] for member in self._members]
        send_note(sock, {"purpose": "train", "rank": self._rank, "members": members}, GREETING)
        missing, heard = [0], time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while True:
                if selector.select(RETRY):
                    note = recv_note(sock, limit=GREETING)
                    if note.get("go"):
                        return sock
                    missing, heard = self._hear(note), time.monotonic()
                silent = time.monotonic() - heard > STALL
                # The chief gives up at about the same time and knows best for whom: hear it out.
                extra = 0.0 if silent else GREETING
                self._look_around(sorted({0, *missing}) if silent else missing, extra=extra)

    def _hear(self, note: dict[str, object]) -> list[int]:
        """Return the ranks that the chief misses; raise if it waits no longer, or not for us."""
        if "failed" in note:
            raise ReplicaMissing(str(note["failed"]), str(note.get("who", "")))
        if "refused" in note:
            chief = self._members[0]
            raise ClusterError(
                f"{chief} refused {self._members[self._rank].name}: {note['refused']}"
            )
        if "again" in note:
            raise ConnectionError(str(note["again"]))
        missing = note.get("missing")
        if not isinstance(missing, list):
            return [0]
        known = range(len(self._members))
        # Ourselves we know to be here, whatever the chief thought when it wrote this.
        return [rank for rank in missing if rank in known and rank != self._rank]

    def _look_around(self, missing: Sequence[int], why: str = "", extra: float = 0.0) -> None:
        """Say who is missing, when it is time to; give up when the limit and `extra` are over."""
        members = [self._members[rank] for rank in missing]
        if self._patience.waited >= self._limit + extra:
            raise missing_error(members or self._members[:1], self._patience.waited, why)
        say_missing(members, self._patience)
