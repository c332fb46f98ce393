"""The chief's side of a rendezvous: open the door, know who is here, say who is missing."""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from stratagem.cluster.handshake import peer_name, prove, recv_note, send_note
from stratagem.cluster.trouble import Member
from stratagem.cluster.waiting import FIRST, Wait, missing_error, say_missing
from stratagem.errors import ReplicaMissing

log = logging.getLogger("stratagem")

GREETING = 5.0  # seconds a peer has to prove the secret and say who it is
AT_ONCE = 64  # peers that may be doing so at a time
UPDATE = 1.0  # seconds between two words to those who wait

_Arrival = tuple[socket.socket, dict[str, object]]

_PAUSE = 0.1
_SEND = 1.0


class Reception:
    """Gathers a connection to every other member."""

    def __init__(self, members: Sequence[Member], secret: bytes, limit: float) -> None:
        self._members = members
        self._secret = secret
        self._patience = Wait(limit, first=FIRST)
        self._present: dict[int, socket.socket] = {}
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._greeting = threading.BoundedSemaphore(AT_ONCE)
        self._open = True
        self._update = 0.0

    def gather(self, listener: socket.socket) -> dict[int, socket.socket]:
        """Return the connections by rank once all are here; closes the listener."""
        done = False
        try:
            with listener, selectors.DefaultSelector() as selector:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
                while self._missing():
                    self._attend(selector, listener)
            self._tell({"go": True})
            done = True
            return dict(self._present)
        except ReplicaMissing as problem:
            self._tell({"failed": str(problem), "who": problem.who})
            raise
        finally:
            self._open = False
            self._turn_away_the_rest()
            if not done:
                for conn in self._present.values():
                    conn.close()

    def _attend(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        """One round: whoever knocks, whoever hung up, and a word to those who wait."""
        for key, _ in selector.select(_PAUSE):
            if key.fileobj is listener:
                self._accept(listener)
            else:
                self._left(selector, key.data)
        while not self._arrivals.empty():
            conn, hello = self._arrivals.get()
            rank = self._admit(conn, hello)
            if rank is not None:
                selector.register(conn, selectors.EVENT_READ, rank)
        missing = self._missing()
        if missing and self._patience.over:
            raise missing_error([self._members[rank] for rank in missing], self._patience.waited)
        say_missing([self._members[rank] for rank in missing], self._patience)
        if time.monotonic() >= self._update:
            self._update = time.monotonic() + UPDATE
            self._tell({"missing": missing})

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, len(self._members)) if rank not in self._present]

    def _accept(self, listener: socket.socket) -> None:
        try:
            conn, _ = listener.accept()
        except OSError:
            return  # it hung up before we came to the door
        conn.setblocking(True)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._greeting.acquire(blocking=False):
            conn.close()  # a crowd at the door: a member will knock again
            return
        threading.Thread(
            target=self._greet, args=(conn,), name="stratagem-greeting", daemon=True
        ).start()

    def _greet(self, conn: socket.socket) -> None:
        """Hear a peer out, in a thread of its own: one that says nothing holds up nobody."""
        try:
            prove(conn, self._secret, server=True, limit=GREETING)
            hello = recv_note(conn, limit=GREETING)
        except OSError as problem:
            log.warning("refused a connection from %s: %s", peer_name(conn), problem)
            conn.close()
            return
        finally:
            self._greeting.release()
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
        """Let a member in, or tell it in a sentence why not."""
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

    def _objection(self, hello: Mapping[str, object], conn: socket.socket) -> str | None:
        """Say why a peer that belongs to the job cannot come in as what it claims to be."""
        if hello.get("purpose") != "train":
            return "the training itself is listening here, waiting for its tasks"
        if hello.get("members") != [[member.name, member.where] for member in self._members]:
            return (
                f"its cluster is not the chief's, which has {len(self._members)} training tasks: "
                "give every task the same cluster"
            )
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 < rank < len(self._members):
            return f"there is no rank {rank!r} to take, among {len(self._members)} training tasks"
        if rank in self._present:
            return (
                f"{self._members[rank].name} is already here, from "
                f"{peer_name(self._present[rank])}: two processes were started as the same task. "
                "Give each its own task index"
            )
        return None

    def _left(self, selector: selectors.BaseSelector, rank: int) -> None:
        """A member that waited hung up (it has nothing to say yet): wait for it anew."""
        conn = self._present.pop(rank)
        selector.unregister(conn)
        conn.close()
        log.warning("%s left before everybody was here", self._members[rank])

    def _tell(self, note: Mapping[str, object]) -> None:
        for conn in self._present.values():
            try:
                send_note(conn, note, limit=_SEND)
            except OSError:
                continue  # the selector, or later the membership, finds it gone
