"""The thread that serves a member's connections: heartbeats, notes, and lost connections.

Replicas connect to the chief, by rank; the tasks of a job with servers to the coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from stratagem.cluster.handshake import encode_note, note_reader
from stratagem.cluster.heartbeat import BEAT, Key
from stratagem.cluster.sockets import not_in_children

log = logging.getLogger("stratagem")

LINGER = 1.0  # seconds to wait for peers to close after a goodbye
BUSY = 10.0  # seconds that `stop` waits for a callback

_BEAT = encode_note({"t": "beat"})
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_Heard = TypeVar("_Heard", contravariant=True)


class StarHandler(Protocol[_Heard]):
    """The callbacks of a Star, always from its thread and never with a lock held."""

    def alive(self, rank: _Heard, now: float) -> None:
        """Bytes came from this rank."""

    def heard(self, rank: _Heard, note: dict[str, object]) -> None:
        """A note came from this rank; raising means that it is invalid."""

    def lost(self, rank: _Heard, why: str) -> None:
        """The connection to this rank ended."""

    def tick(self, now: float) -> None:
        """A heartbeat interval has passed."""


class BufferedSocket(Generic[Key]):
    """The connection to one rank, with buffers for writing and reading."""

    def __init__(self, rank: Key, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.rank = rank
        self.sock = not_in_children(sock)
        self.pending = bytearray()
        self.notes = note_reader()
        self.broken = False

    def queue(self, data: bytes) -> None:
        """Append bytes to be written."""
        if not self.broken:
            self.pending += data

    def write(self) -> None:
        """Send what the kernel takes without blocking."""
        try:
            while self.pending:
                del self.pending[: self.sock.send(self.pending)]
        except _LATER:
            pass  # the rest when the socket is writable
        except OSError:
            # The peer is gone, but its last notes may still be unread: reading, which fails after
            # them, reports the loss.
            self.broken = True
            self.pending.clear()


class Star(Generic[Key]):
    """Connections by rank, served by one daemon thread."""

    def __init__(self, sockets: Mapping[Key, socket.socket], listener: StarHandler[Key]) -> None:
        self._links: dict[Key, BufferedSocket[Key]] = {}
        self._dirty: set[BufferedSocket[Key]] = set()  # links with something to write
        self._listener = listener
        self._calls: deque[Callable[[], object]] = deque()
        self._flushes: list[threading.Event] = []
        self._last_call: float | None = None
        self._wake_in, self._wake_out = map(not_in_children, socket.socketpair())
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        for rank, sock in sockets.items():
            self._take(rank, sock)
        self._thread = threading.Thread(target=self._run, name="stratagem-membership", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, rank: Key, sock: socket.socket) -> None:
        """Add a connection."""
        self.call(lambda: self._take(rank, sock))

    def call(self, action: Callable[[], object]) -> None:
        """Run an action on the thread."""
        self._calls.append(action)
        with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
            self._wake_out.send(b"\0")

    def post(
        self, note: Mapping[str, object], but: Key | None = None, to: Key | None = None
    ) -> None:
        """Send a note to all ranks, to all but one, or to one."""
        data = encode_note(note)
        self.call(lambda: self._queue(data, but, to))

    def flush(self, seconds: float) -> None:
        """Wait until all posted notes are in the kernel's buffers; no-op on the thread itself."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return
        done = threading.Event()
        self.call(lambda: self._flushes.append(done))
        done.wait(seconds)

    def hang_up(self, rank: Key) -> None:
        """Close a connection after sending what was posted before."""
        self.call(lambda: self.drop(rank))

    def drop(self, rank: Key) -> None:
        """Close a connection (on the thread only)."""
        link = self._links.pop(rank, None)
        if link is not None:
            self._dirty.discard(link)
            link.write()
            self._selector.unregister(link.sock)
            link.sock.close()

    def end(self, rank: Key, sock: socket.socket) -> None:
        """Read a dead peer's last notes and drop its connection, which the kernel has not closed
        yet (on the thread only)."""
        link = self._links.get(rank)
        if link is None or link.sock is not sock:
            return
        while self._read(link, time.monotonic()):
            pass
        if self._links.get(rank) is link:
            self.drop(rank)
            self._listener.lost(rank, "its process has ended")

    def stop(self, *, wait: bool = True) -> None:
        """Send what is posted, close all connections and end the thread."""
        self.call(self._begin_to_stop)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(LINGER + BUSY)
            if self._thread.is_alive():
                log.warning("the membership's thread is still busy with a callback; not waiting")

    def _begin_to_stop(self) -> None:
        """Begin to linger; drop sockets that their owner has closed, as the selector never reports
        their end."""
        for rank in [rank for rank, link in self._links.items() if link.sock.fileno() < 0]:
            self.drop(rank)
        if self._last_call is None:
            self._last_call = time.monotonic() + LINGER

    def _take(self, rank: Key, sock: socket.socket) -> None:
        if sock.fileno() < 0:
            self._listener.lost(rank, "its connection was closed at once")
            return
        link = self._links[rank] = BufferedSocket(rank, sock)
        self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _queue(self, data: bytes, but: Key | None, to: Key | None) -> None:
        for rank, link in self._links.items():
            if rank != but and to in (None, rank):
                link.queue(data)
                self._dirty.add(link)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as problem:
            # After a defect of ours the job must not wait for this thread.
            log.exception("the membership of this process failed")
            for rank in list(self._links):
                self._listener.lost(rank, f"this process stopped listening to it ({problem!r})")
        finally:
            self._close()

    def _serve(self) -> None:
        beat = time.monotonic()
        while True:
            while self._calls:
                self._calls.popleft()()
            self._write()
            if self._finished():
                return
            events = self._selector.select(max(0.0, beat - time.monotonic()))
            now = time.monotonic()
            for key, _ in events:
                self._read(key.data, now)
            if now >= beat:
                beat = now + BEAT
                self._beat()
                self._listener.tick(now)

    def _finished(self) -> bool:
        """Whether peers have closed after the goodbye, which closing first could destroy."""
        if self._last_call is None:
            return False
        return not self._links or time.monotonic() >= self._last_call

    def _beat(self) -> None:
        for link in self._links.values():
            if (
                not link.pending and self._last_call is None
            ):  # a peer that does not read needs no pile of beats
                link.queue(_BEAT)
                self._dirty.add(link)

    def _write(self) -> None:
        """Write what the kernel takes, and poll for the rest."""
        stopping = self._last_call is not None
        for link in list(self._links.values() if stopping else self._dirty):
            link.write()
            want = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.pending else 0)
            if self._selector.get_key(link.sock).events != want:
                self._selector.modify(link.sock, want, link)
            if link.pending:
                continue
            self._dirty.discard(link)
            if stopping:
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown, which drops its keys.
                    socket.socket.shutdown(link.sock, socket.SHUT_WR)
        if not self._dirty:
            for done in self._flushes:
                done.set()
            self._flushes.clear()

    def _read(self, link: BufferedSocket[Key] | None, now: float) -> bool:
        """Read and handle notes; returns whether there may be more."""
        if link is None:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
            return False
        if self._links.get(link.rank) is not link:
            return False  # dropped by an earlier event of this round
        try:
            piece = link.sock.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("its connection closed without a goodbye")
            self._listener.alive(link.rank, now)
            for note, _ in link.notes.feed(piece):
                self._listener.heard(link.rank, note)
            return True
        except _LATER:
            return False  # nothing to read
        except Exception as problem:
            # A member that sends invalid notes is as lost as one that hung up.
            self.drop(link.rank)
            self._listener.lost(link.rank, _why(problem))
            return False

    def _close(self) -> None:
        for link in self._links.values():
            link.sock.close()
        self._links.clear()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()


def _why(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return f"its connection ended ({problem.strerror})"
    return str(problem) or repr(problem)
