"""Who is connected to a server: workers, heartbeats of tasks, and the evaluator.

Heartbeats come through a star of cluster/star.py, as they do between replicas; the arithmetic of
silence is that of cluster/heartbeat.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.failure import error_note
from stratagem.cluster.heartbeat import Heartbeats, Silence
from stratagem.cluster.star import Star
from stratagem.errors import ReplicaError
from stratagem.servers.requests import Peer
from stratagem.wire.connection import detach

log = logging.getLogger("stratagem")

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
