"""The heartbeats between the tasks and the coordinator, and the connections of a server.

A task beats so that the coordinator knows that it lives; the coordinator beats and says what goes
wrong. Beats and notes go through a `Star`, as they do between replicas, and `Heartbeats` finds
the silent ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.failure import error_note, error_of, hangs, server_lost
from stratagem.cluster.heartbeat import Heartbeats, Silence
from stratagem.cluster.membership import FLUSH
from stratagem.cluster.star import Star
from stratagem.errors import ReplicaError
from stratagem.servers.requests import Peer
from stratagem.wire.connection import Connection, detach

log = logging.getLogger("stratagem")

KNOWS_BETTER = 1.0  # seconds in which the heartbeat learns why a connection has closed
_COORDINATOR = "ps 0"


class TaskHeartbeat:
    """A task's side of the heartbeat, on a connection of its own.

    When the job cannot go on, `trouble` is set, and `on_trouble` is called with it once, to wake
    threads that wait for a server.
    """

    def __init__(
        self, connection: Connection, give_up: float, on_trouble: Callable[[ReplicaError], None]
    ) -> None:
        self.trouble: ReplicaError | None = None
        #: names of tasks that are silent at present, as the coordinator says
        self.silent: set[str] = set()
        #: names of workers that the coordinator has given up, until they have been replaced
        self.given_up: set[str] = set()
        #: on the chief: called with the figures of every worker
        self.on_figures: Callable[[Mapping[str, Any]], None] | None = None
        #: whether the coordinator has said that the job has ended well; what is called then
        self.over = False
        self.on_over: Callable[[], None] = lambda: None
        self._on_trouble = on_trouble
        self._changed = threading.Condition()
        self._left = False
        self._coordinator = Heartbeats([_COORDINATOR], time.monotonic(), give_up)
        self._star = Star({_COORDINATOR: detach(connection)}, self)
        self._star.start()

    def leave(self, *, wait: bool = True) -> None:
        """Say goodbye; from now on the end of the coordinator is no trouble."""
        with self._changed:
            first, self._left = not self._left, True
            self._changed.notify_all()
        if first:
            self.tell({"bye": 1})
        self._star.stop(wait=wait)

    def send_figures(self, line: dict[str, Any]) -> None:
        """Send the chief this worker's newest line of figures."""
        self.tell({"figures": line})

    def announce(self, error: ReplicaError) -> None:
        """Tell the coordinator why this task ends."""
        self.tell({"dying": error_note(error)})
        self._star.flush(FLUSH)  # the caller may be about to exit

    def tell(self, note: Mapping[str, Any]) -> None:
        """Send the coordinator a note."""
        self._star.post(note)

    def await_trouble(self) -> ReplicaError | None:
        """Wait for trouble that may explain an error seen elsewhere, such as a closed socket."""
        with self._changed:
            self._changed.wait_for(lambda: self.trouble or self._left, KNOWS_BETTER)
        return self.trouble

    def fail(self, trouble: ReplicaError) -> None:
        """Set the trouble that ends the job; the first one counts."""
        with self._changed:
            if self.trouble is not None or self._left:
                return
            self.trouble = trouble
            self._changed.notify_all()
        self._on_trouble(trouble)

    # --- what the star calls, on its thread -----------------------------------------------------

    def alive(self, _: str, now: float) -> None:
        self._coordinator.heard(_COORDINATOR, now)

    def lost(self, _: str, why: str) -> None:
        self.fail(server_lost(_COORDINATOR, why))

    def tick(self, now: float) -> None:
        for silence in self._coordinator.check(now):
            if silence.over:
                text = f"{_COORDINATOR} has not answered for {silence.seconds:.0f} s"
                self.fail(hangs(_COORDINATOR, text))
            elif self.trouble is None and not self._left:
                log.warning("ps 0 has been silent for %.0f s; waiting for it", silence.seconds)

    def heard(self, _: str, note: dict[str, Any]) -> None:
        if self._left:
            return
        if "say" in note:
            log.warning("%s", note["say"])
        if "silent" in note:
            self.silent = set(note["silent"])
        if "given up" in note:
            self.given_up.add(str(note["given up"]))
        if "figures" in note and self.on_figures is not None:
            try:
                self.on_figures(note["figures"])
            except ValueError as problem:
                log.warning("figures of a worker make no sense: %s", problem)
        if "over" in note:
            self.over = True
            self.on_over()  # first: who waits for trouble goes on when this has left
            self.leave(wait=False)
        if "error" in note:
            error = error_of(note)
            if isinstance(error, ReplicaError):
                self.fail(error)


#: what the silence of a task means for the other tasks
_SILENCE = {
    "ps": "(stopped, or its machine hangs?); everybody waits for it",
    "worker": "(stopped, or its machine hangs?); the others go on as far as the rule lets them",
}


class Peers:
    """The connections of one server. Any thread may call; no lock is held for long."""

    def __init__(self, give_up: float) -> None:
        self._lock = threading.Lock()
        self._peers: list[Peer] = []
        self._heartbeats: Heartbeats[Peer] = Heartbeats((), time.monotonic(), give_up)
        self._star: Star[Peer] | None = None

    def add(self, peer: Peer) -> None:
        with self._lock:
            self._peers.append(peer)

    def remove(self, peer: Peer) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
            self._heartbeats.forget(peer)
        peer.hang_up()

    def present(self, role: str | None = None, token: str | None = None) -> list[Peer]:
        """Return the peers of a role, of a process, or all."""
        with self._lock:
            return [
                peer
                for peer in self._peers
                if (role is None or peer.role == role) and (token is None or peer.token == token)
            ]

    def heard_workers(self) -> set[int]:
        """Return the numbers of the workers that are not silent."""
        heard = [peer for peer in self.present("heartbeat") if not peer.silent]
        return {peer.worker for peer in heard if peer.worker >= 0}

    # --- heartbeats ---------------------------------------------------------------------------

    def listen_to(self, peer: Peer) -> None:
        """Exchange heartbeats with a task; its notes are put into `peer.notes`."""
        with self._lock:
            self._heartbeats.expect(peer, time.monotonic())
            if self._star is None:
                self._star = Star({}, self)
                self._star.start()
        peer.star = self._star
        self._star.add(peer, detach(peer.connection))

    def close(self) -> None:
        """Send the pending notes, and end the heartbeats."""
        if self._star is not None:
            self._star.stop()

    def alive(self, peer: Peer, now: float) -> None:
        """Note a heartbeat (on the star's thread, as the next three)."""
        with self._lock:
            ended = self._heartbeats.heard(peer, now)
        if ended is not None:
            self._set_silent(peer, False)
            self.say(f"{peer.name} is heard again")

    def heard(self, peer: Peer, note: dict[str, Any]) -> None:
        if "t" not in note:  # a beat has it
            peer.notes.put(note)

    def lost(self, peer: Peer, why: str) -> None:
        log.info("no heartbeat of %s: %s", peer.name, why)
        peer.notes.put(None)

    def tick(self, now: float) -> None:
        """Do nothing: `check_silence` may wait for the coordinator's lock; this thread must not."""

    def check_silence(self, give_up: Callable[[Peer, str], None]) -> None:
        """Log who is silent, and give up peers that have been silent too long."""
        with self._lock:
            silences: list[Silence[Peer]] = self._heartbeats.check(time.monotonic())
        for silence in silences:
            peer, text = silence.rank, f"has been silent for {silence.seconds:.0f} s"
            if silence.over:
                give_up(peer, text)
            else:
                self._set_silent(peer, True)
                self.say(f"{peer.name} {text} {_SILENCE['ps' if peer.worker < 0 else 'worker']}")

    def _set_silent(self, heartbeat: Peer, silent: bool) -> None:
        heartbeat.silent = silent
        for peer in self.present("worker", heartbeat.token):
            if peer.participant is not None:
                peer.participant.silent = silent

    # --- notes to the peers -------------------------------------------------------------------

    def say(self, text: str, more: Mapping[str, Any] | None = None) -> None:
        """Log a sentence here and on the chief, whose output a person reads."""
        log.warning("%s", text)
        silent = [peer.name for peer in self.present("heartbeat") if peer.silent]
        self.tell({"say": text, "silent": silent, **(more or {})}, chief=True)

    def tell(self, note: Mapping[str, Any], *, chief: bool = False) -> None:
        """Send a note to all tasks, or to the chief alone."""
        for peer in self.present("heartbeat"):
            if peer.chief or not chief:
                peer.tell(note)

    def dismiss(self, token: str, why: ReplicaError | None = None) -> None:
        """Close all connections of a process, and tell it why."""
        peers = self.present(token=token)
        for peer in sorted(peers, key=lambda peer: peer.role != "heartbeat"):
            peer.dismissed, peer.silent = True, False
            if peer.participant is not None:
                peer.participant.gone = True
            if peer.role == "heartbeat" and why is not None:
                peer.tell(error_note(why))
            peer.hang_up()  # the thread that serves it takes it out
