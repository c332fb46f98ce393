"""Heartbeats of the tasks, on both sides: the coordinator learns that a task lives, the task what
goes wrong. And who is connected to a server: workers, heartbeats of tasks, and the evaluator.

Beats and notes go through a star of cluster/star.py, as they do between replicas; the arithmetic of
silence is that of cluster/heartbeat.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.failure import error_note, error_of, hangs, server_lost
from stratagem.cluster.heartbeat import Heartbeats, Silence
from stratagem.cluster.star import Star
from stratagem.errors import ReplicaError
from stratagem.servers.requests import Peer
from stratagem.wire.connection import Connection, detach

log = logging.getLogger("stratagem")

KNOWS_BETTER = 1.0  # seconds until the heartbeat knows why a connection has closed
_FLUSH = 1.0  # seconds that last words may take to leave this process
_COORDINATOR = "ps 0"


class TaskHeartbeat:
    """Beats on a connection of its own.

    When the job cannot go on, `trouble` is set and `on_trouble` called with it, once, to wake
    threads that wait for a server.
    """

    def __init__(
        self, connection: Connection, give_up: float, on_trouble: Callable[[ReplicaError], None]
    ) -> None:
        self.trouble: ReplicaError | None = None
        #: names of tasks that the coordinator does not hear at present
        self.silent: set[str] = set()
        #: names of workers that the coordinator has given up; whoever acts on it takes them out
        self.given_up: set[str] = set()
        #: on the chief: called with every worker's
        self.on_figures: Callable[[Mapping[str, Any]], None] | None = None
        #: called when the coordinator says that the job has ended well
        self.on_over: Callable[[], None] = lambda: None
        self._known, self._falling = threading.Event(), threading.Lock()
        self._on_trouble = on_trouble
        self._leaving = False
        self._coordinator = Heartbeats([_COORDINATOR], time.monotonic(), give_up)
        self._star = Star({_COORDINATOR: detach(connection)}, self)
        self._star.start()

    def stop(self) -> None:
        """Say goodbye."""
        self.mute()
        self._star.stop()

    def mute(self) -> None:
        """Say goodbye without waiting; the end of the coordinator means nothing from now on."""
        if not self._leaving:
            self._leaving = True
            self._known.set()
            self.tell({"bye": 1})
            self._star.stop(wait=False)

    def send_figures(self, line: dict[str, Any]) -> None:
        """Have the chief hear this worker's newest line of figures."""
        self.tell({"figures": line})

    def last_words(self, error: ReplicaError) -> None:
        """Tell the coordinator why this task ends."""
        self.tell({"dying": error_note(error)})
        self._star.flush(_FLUSH)

    def tell(self, note: Mapping[str, Any]) -> None:
        """Send the coordinator a note between two beats."""
        self._star.post(note)

    def explain(self) -> ReplicaError | None:
        """Return the trouble, if it is known soon."""
        self._known.wait(KNOWS_BETTER)
        return self.trouble

    def fall(self, trouble: ReplicaError) -> None:
        """Set the trouble that ends the job; the first one counts."""
        with self._falling:
            if self.trouble is not None or self._leaving:
                return
            self.trouble = trouble
        self._known.set()
        self._on_trouble(trouble)

    # --- what the star says, from its thread ----------------------------------------------------

    def alive(self, _: str, now: float) -> None:
        self._coordinator.heard(_COORDINATOR, now)

    def lost(self, _: str, why: str) -> None:
        self.fall(server_lost(_COORDINATOR, why))

    def tick(self, now: float) -> None:
        for silence in self._coordinator.check(now):
            if silence.over:
                text = f"{_COORDINATOR} has not answered for {silence.seconds:.0f} s"
                self.fall(hangs(_COORDINATOR, text))
            elif self.trouble is None and not self._leaving:
                log.warning("ps 0 has been silent for %.0f s; waiting for it", silence.seconds)

    def heard(self, _: str, note: dict[str, Any]) -> None:
        if self._leaving:
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
            self.mute()
            self.on_over()
        if "error" in note:
            error = error_of(note)
            if isinstance(error, ReplicaError):
                self.fall(error)


#: what the silence of a task means for the others
_SILENCE = {
    "ps": "(stopped, or its machine hangs?); everybody waits for it",
    "worker": "(stopped, or its machine hangs?); the others go on as far as the rule lets them",
}


class Peers:
    """The connections of one server. Any thread may call; no lock is held for long."""

    def __init__(self, give_up: float) -> None:
        self._lock = threading.Lock()
        self._here: list[Peer] = []
        self._heartbeats: Heartbeats[Peer] = Heartbeats((), time.monotonic(), give_up)
        self._star: Star[Peer] | None = None

    def add(self, peer: Peer) -> None:
        with self._lock:
            self._here.append(peer)

    def remove(self, peer: Peer) -> None:
        with self._lock:
            if peer in self._here:
                self._here.remove(peer)
            self._heartbeats.forget(peer)
        peer.hang_up()

    def present(self, role: str | None = None, token: str | None = None) -> list[Peer]:
        """Return the peers of a role, or of a process, or all."""
        with self._lock:
            return [
                peer
                for peer in self._here
                if (role is None or peer.role == role) and (token is None or peer.token == token)
            ]

    def heard_workers(self) -> set[int]:
        """Return the workers whose processes are heard."""
        heard = [peer for peer in self.present("heartbeat") if not peer.silent]
        return {peer.worker for peer in heard if peer.worker >= 0}

    # --- heartbeats ---------------------------------------------------------------------------

    def listen_to(self, peer: Peer) -> None:
        """Beat with a task from now on; what it says is put into `peer.notes`."""
        with self._lock:
            self._heartbeats.expect(peer, time.monotonic())
            if self._star is None:
                self._star = Star({}, self)
                self._star.start()
        peer.star = self._star
        self._star.add(peer, detach(peer.connection))

    def close(self) -> None:
        """Send what was told, and beat no more."""
        if self._star is not None:
            self._star.stop()

    def alive(self, peer: Peer, now: float) -> None:
        """Note a heartbeat (from the star's thread, as the next three)."""
        with self._lock:
            ended = self._heartbeats.heard(peer, now)
        if ended is not None:
            self._hush(peer, False)
            self.say(f"{peer.name} is heard again")

    def heard(self, peer: Peer, note: dict[str, Any]) -> None:
        if "t" not in note:  # else a beat
            peer.notes.put(note)

    def lost(self, peer: Peer, why: str) -> None:
        log.info("no heartbeat of %s: %s", peer.name, why)
        peer.notes.put(None)

    def tick(self, now: float) -> None:
        """Do nothing: `look` may have to wait, and has a thread that can."""

    def look(self, give_up: Callable[[Peer, str], None]) -> None:
        """Name silent peers, give up those that are silent too long."""
        with self._lock:
            silences: list[Silence[Peer]] = self._heartbeats.check(time.monotonic())
        for silence in silences:
            peer, text = silence.rank, f"has been silent for {silence.seconds:.0f} s"
            if silence.over:
                give_up(peer, text)
            else:
                self._hush(peer, True)
                self.say(f"{peer.name} {text} {_SILENCE['ps' if peer.worker < 0 else 'worker']}")

    def _hush(self, heartbeat: Peer, silent: bool) -> None:
        heartbeat.silent = silent
        for peer in self.present("worker", heartbeat.token):
            if peer.participant is not None:
                peer.participant.silent = silent

    # --- what they are told -------------------------------------------------------------------

    def say(self, text: str, more: Mapping[str, Any] | None = None) -> None:
        """Log a sentence here and on the chief, where a person looks."""
        log.warning("%s", text)
        silent = [peer.name for peer in self.present("heartbeat") if peer.silent]
        self.tell({"say": text, "silent": silent, **(more or {})}, chief=True)

    def tell(self, note: Mapping[str, Any], *, chief: bool = False) -> None:
        """Send a note to the heartbeats of all tasks, or to the chief's."""
        for peer in self.present("heartbeat"):
            if peer.chief or not chief:
                peer.tell(note)

    def dismiss(self, token: str, why: ReplicaError | None = None) -> None:
        """Hang up on a process, and tell it why."""
        peers = self.present(token=token)
        for peer in sorted(peers, key=lambda peer: peer.role != "heartbeat"):
            peer.dismissed, peer.silent = True, False
            if peer.participant is not None:
                peer.participant.gone = True
            if peer.role == "heartbeat" and why is not None:
                peer.tell(error_note(why))
            peer.hang_up()  # its own thread sees to the rest
