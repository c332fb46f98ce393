"""A task's heartbeat: the coordinator learns that the task lives, the task what goes wrong.

Beats and notes go through a star of cluster/star.py, as they do between replicas.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.failure import error_note, error_of, hangs, server_lost
from stratagem.cluster.heartbeat import Heartbeats
from stratagem.cluster.star import Star
from stratagem.errors import ReplicaError
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
