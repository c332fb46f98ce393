"""Who is connected to a server: workers, heartbeats of tasks, and the evaluator.

The silence of heartbeats is reckoned by cluster/heartbeat.py, as it is between replicas.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.failure import error_note
from stratagem.cluster.heartbeat import Heartbeats, Silence
from stratagem.errors import ReplicaError
from stratagem.servers.requests import Peer

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

    def add(self, peer: Peer) -> None:
        with self._lock:
            self._here.append(peer)
            if peer.role == "heartbeat":
                self._heartbeats.expect(peer, time.monotonic())

    def remove(self, peer: Peer) -> None:
        with self._lock:
            self._here.remove(peer)
            self._heartbeats.forget(peer)
        peer.connection.close()

    def present(self, role: str | None = None, token: str | None = None) -> list[Peer]:
        """Return the peers of a role, or of a process, or all."""
        with self._lock:
            return [
                peer
                for peer in self._here
                if (role is None or peer.role == role) and (token is None or peer.token == token)
            ]

    def alive(self) -> set[int]:
        """Return the workers whose processes are heard."""
        heard = [peer for peer in self.present("heartbeat") if not peer.silent]
        return {peer.worker for peer in heard if peer.worker >= 0}

    # --- heartbeats ---------------------------------------------------------------------------

    def heard(self, heartbeat: Peer) -> None:
        """Note a heartbeat."""
        with self._lock:
            ended = self._heartbeats.heard(heartbeat, time.monotonic())
        if ended is not None:
            self._hush(heartbeat, False)
            self.say(f"{heartbeat.name} is heard again")

    def overslept(self, seconds: float) -> None:
        """Take this process' own pause off all silences."""
        with self._lock:
            self._heartbeats.overslept(seconds, time.monotonic())

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
            peer.connection.close()  # its own thread sees to the rest
