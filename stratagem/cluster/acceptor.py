"""Accepts connections on a port of the job, from peers that prove the secret.

    kernel's queue ──> strangers: at most PLACES, served by one thread ──> members: a thread each
                       closed after GREETING seconds, or to make room

A stranger has no thread, and no more memory than one message of the greeting. When all places are
taken, the oldest stranger of the address with most of them is closed: a member needs its place for
two round trips only, so an outsider who holds places keeps no member out. Strangers are accepted
while serving them takes less than COST of a processor; the rest wait in the kernel's queue, and a
member that is not served in time tries again. Members take no part in these limits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stratagem.cluster.handshake import Proof, WrongSecret, no_answer, peer_name
from stratagem.cluster.parsing import listing
from stratagem.cluster.sockets import not_in_children
from stratagem.errors import HandshakeError

log = logging.getLogger("stratagem")

GREETING = 5.0  # seconds for a peer to prove the secret, and then to send its hello
PLACES = 256  # connections that have not proved it
COST = 0.03  # of a processor, that strangers may use in the long run
AT_ONCE = 0.01  # seconds of processor time that they may use at once
A_MEMBER = 0.0005  # seconds that each member adds to the budget
EVERY = 60.0  # seconds between two log lines that sum up refusals

_PAUSE = 0.2  # seconds to the next try, without a descriptor left or after an unforeseen error
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Refusals:
    """The refused connections of one port: the first of each kind is logged, the rest counted."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._counted: Counter[str] = Counter()
        self._since = time.monotonic()

    def tell(self, peer: str, problem: Exception) -> None:
        """Log a refusal if it is the first of its kind, else count it."""
        kind = type(problem).__name__
        with self._lock:
            first = kind not in self._known
            if not first:
                self._counted[peer.rpartition(":")[0] or peer] += 1
            elif not self._known:
                self._since = time.monotonic()
            self._known.add(kind)
        if first:
            log.warning("refused a connection from %s: %s", peer, problem)
        self.sum_up(EVERY)

    def sum_up(self, after: float = 0.0) -> None:
        """Log and reset the count if `after` seconds have passed since the last line."""
        now = time.monotonic()
        with self._lock:
            passed = now - self._since
            if not self._counted or passed < after:
                return
            counted, self._counted, self._since = self._counted, Counter(), now
        hosts = listing([host for host, _ in counted.most_common(3)], most=3)
        others = f" and {len(counted) - 3} more addresses" if len(counted) > 3 else ""
        log.warning(
            "refused %d more connections to %s within %.0f s, from %s%s",
            counted.total(),
            self.where,
            passed,
            hosts,
            others,
        )


class TooManyStrangers(HandshakeError):
    """A connection was closed to make room for others that are to prove the secret."""


class _Budget:
    """The processor time that strangers may use; for the thread that serves them."""

    def __init__(self) -> None:
        self._left, self._when = AT_ONCE, time.monotonic()
        self._spent = time.thread_time()

    def allows(self) -> bool:
        """Whether another stranger may be accepted."""
        now, spent = time.monotonic(), time.thread_time()
        earned = min(AT_ONCE, self._left + COST * (now - self._when))
        self._left, self._when, self._spent = earned - (spent - self._spent), now, spent
        return self._left > 0

    def give_back(self) -> None:
        """Add time for a member that came in, so that many members need not wait."""
        self._left += A_MEMBER

    @property
    def pause(self) -> float:
        """Seconds until more strangers may be accepted."""
        return max(0.0, 0.0005 - self._left) / COST


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection that has not proved the secret."""

    sock: socket.socket
    proof: Proof
    peer: str
    host: str
    received: int = 0
    until: float = field(default_factory=lambda: time.monotonic() + GREETING)


class Acceptor:
    """Serves a listening socket, which it owns, from `open` until `close`.

    `come_in` gets each connection that has proved the secret, in blocking mode, on its own thread.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        come_in: Callable[[socket.socket], None],
        where: str,
    ) -> None:
        self.refusals = Refusals(where)
        self._secret = secret
        self._come_in = come_in
        #: strangers by their host, the oldest first
        self._outside: dict[str, dict[socket.socket, _Stranger]] = {}
        self._count = 0
        self._closed = False
        self._accept_from = time.monotonic()
        self._sock = not_in_children(sock)
        self._sock.setblocking(False)
        self._wake_in, self._wake_out = map(not_in_children, socket.socketpair())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._attend, name="stratagem-acceptor", daemon=True)

    def open(self) -> None:
        """Begin to accept; apart from the constructor, so that `come_in`'s owner is complete."""
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> bool:
        """Stop listening, and close the connections that have not proved the secret.

        False if it was closed before, or is a forked child's copy.
        """
        if self._sock.fileno() < 0:
            return False
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")
        if self._thread.ident is None:  # it was never opened
            self._attend()
        else:
            self._thread.join()
        return True

    def _attend(self) -> None:
        self._budget = _Budget()
        with self._sock, self._wake_in, self._wake_out, self._selector:
            while not self._closed:
                try:
                    self._do_round()
                except Exception:  # the port must outlive it
                    _tell_unforeseen(self.refusals.where)
                    time.sleep(_PAUSE)
            for stranger in [each for room in self._outside.values() for each in room.values()]:
                self._forget(stranger)
                stranger.sock.close()
            self.refusals.sum_up()

    def _do_round(self) -> None:
        """Wait for events and handle them; timeouts first."""
        now = time.monotonic()
        self._refuse_late(now)
        self._listen(now >= self._accept_from)
        for key, _ in self._selector.select(self._until_next(now)):
            if key.fileobj is self._sock:
                self._accept_from = time.monotonic() + self._accept()
            elif isinstance(key.data, _Stranger):
                self._hear(key.data)

    def _listen(self, wanted: bool) -> None:
        """Register or unregister the listening socket with the selector."""
        if wanted == (self._sock.fileno() in self._selector.get_map()):
            return
        if wanted:
            self._selector.register(self._sock, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._sock)

    def _until_next(self, now: float) -> float | None:
        times = [next(iter(room.values())).until for room in self._outside.values()]
        if self._accept_from > now:
            times.append(self._accept_from)
        return max(0.0, min(times) - now) if times else None

    def _accept(self) -> float:
        """Accept connections within the budget; returns the seconds until the next time."""
        while self._budget.allows():
            try:
                sock, _ = self._sock.accept()
            except OSError as problem:
                if problem.errno in _SHORTAGES:
                    self.refusals.tell("a peer", problem)
                    return _PAUSE
                if isinstance(problem, BlockingIOError):
                    return 0.0
                continue  # the peer hung up before
            self._admit(not_in_children(sock))
        return self._budget.pause

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = peer_name(sock)
        stranger = _Stranger(sock, Proof(self._secret, peer), peer, peer.rpartition(":")[0])
        self._outside.setdefault(stranger.host, {})[sock] = stranger
        self._count += 1
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        if self._count > PLACES:
            fullest = max(self._outside.values(), key=len)
            self._refuse(
                next(iter(fullest.values())),
                TooManyStrangers(
                    f"{PLACES} connections have not proved the job's secret, and this is the "
                    "oldest of those from its address; a task of the job will try again"
                ),
            )

    def _hear(self, stranger: _Stranger) -> None:
        if stranger.sock.fileno() < 0:
            return  # refused by an earlier event of this round
        proof = stranger.proof
        try:
            while not proof.holds:
                piece = stranger.sock.recv(proof.wants)
                if not piece:
                    raise ConnectionResetError("it hung up")
                stranger.received += len(piece)
                answer = proof.feed(piece)
                if answer and stranger.sock.send(answer) != len(answer):
                    raise ConnectionResetError("it does not read")
        except BlockingIOError:
            return  # the rest is still to come
        except HandshakeError as problem:
            if isinstance(problem, WrongSecret):
                with contextlib.suppress(OSError):
                    stranger.sock.send(Proof.refusal)
            self._refuse(stranger, problem)
            return
        except OSError as problem:
            self._refuse(stranger, self._silence(stranger, problem))
            return
        self._let_in(stranger)

    def _let_in(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        self._budget.give_back()
        stranger.sock.setblocking(True)
        if stranger.sock.family != socket.AF_UNIX:
            stranger.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(
            target=self._come_in, args=(stranger.sock,), name="stratagem-greeting", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as problem:  # the system has no thread left; the port stays open
            self.refusals.tell(stranger.peer, problem)
            stranger.sock.close()

    def _refuse_late(self, now: float) -> None:
        for room in list(self._outside.values()):
            while room and (oldest := next(iter(room.values()))).until <= now:
                self._refuse(oldest, self._silence(oldest, TimeoutError("timed out")))

    def _silence(self, stranger: _Stranger, problem: OSError) -> HandshakeError:
        wanted = stranger.received + stranger.proof.wants
        return no_answer(stranger.peer, problem, stranger.received, wanted)

    def _refuse(self, stranger: _Stranger, problem: HandshakeError) -> None:
        self._forget(stranger)
        stranger.sock.close()
        self.refusals.tell(stranger.peer, problem)

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        room = self._outside[stranger.host]
        del room[stranger.sock]
        self._count -= 1
        if not room:
            del self._outside[stranger.host]


def _tell_unforeseen(where: str) -> None:
    try:
        log.exception("the door of %s met an unforeseen error, and goes on", where)
    except Exception:  # a logging handler of the user's, which may have raised before, too
        traceback.print_exc()
