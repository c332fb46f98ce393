"""A task's heartbeat: the coordinator learns that the task lives, the task what goes wrong.

The silence of the coordinator is reckoned by cluster/heartbeat.py, as it is between replicas.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.failure import error_note, error_of, server_lost
from stratagem.cluster.heartbeat import BEAT, OVERSLEPT, Heartbeats
from stratagem.errors import ReplicaError, ReplicaStalled
from stratagem.wire.tcp import Connection

log = logging.getLogger("stratagem")

KNOWS_BETTER = 1.0  # seconds until the heartbeat knows why a connection has closed
_LOOK = 0.1  # seconds after which a goodbye is noticed
_COORDINATOR = "ps 0"


class HeartbeatThread:
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
        self._figures: dict[str, Any] | None = None
        #: on the chief: called with every worker's
        self.on_figures: Callable[[Mapping[str, Any]], None] | None = None
        #: called when the coordinator says that the job has ended well
        self.on_over: Callable[[], None] = lambda: None
        self._known, self._falling = threading.Event(), threading.Lock()
        self._connection = connection
        self._give_up = give_up
        self._on_trouble = on_trouble
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stratagem-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        self._connection.close()

    def send_figures(self, line: dict[str, Any]) -> None:
        """Have the chief hear this worker's newest line of figures, with the next beat."""
        self._figures = line

    def mute(self) -> None:
        """Ignore the end of the coordinator from now on."""
        self._stopping.set()

    def last_words(self, error: ReplicaError) -> None:
        """Tell the coordinator why this task ends."""
        self.tell({"dying": error_note(error)})

    def tell(self, note: Mapping[str, Any]) -> None:
        """Send the coordinator a note between two beats."""
        try:
            self._connection.send(note)
        except OSError as problem:
            log.info("the coordinator did not hear %s: %s", list(note), problem)

    def explain(self, seconds: float) -> ReplicaError | None:
        """Return the trouble, if it is known within so many seconds."""
        self._known.wait(seconds)
        return self.trouble

    def fall(self, trouble: ReplicaError) -> None:
        """Set the trouble that ends the job; the first one counts."""
        with self._falling:
            if self.trouble is not None or self._stopping.is_set():
                return
            self.trouble = trouble
        self._known.set()
        self._on_trouble(trouble)

    def _run(self) -> None:
        try:
            self._beat()
        except OSError as problem:
            self.fall(server_lost("ps 0", str(problem)))
        finally:
            self._known.set()

    def _beat(self) -> None:
        before = time.monotonic()
        coordinator = Heartbeats([_COORDINATOR], before, self._give_up)
        while not self._stopping.is_set():
            figures, self._figures = self._figures, None
            self._connection.send({"beat": 1} if figures is None else {"figures": figures})
            until = time.monotonic() + BEAT
            while (left := until - time.monotonic()) > 0 and not self._stopping.is_set():
                if self._connection.readable(min(left, _LOOK)):
                    frame = self._connection.receive()
                    if frame is None:
                        raise ConnectionResetError("its connection closed")
                    coordinator.heard(_COORDINATOR, time.monotonic())
                    self._hear(frame.header)
            now = time.monotonic()
            if now - before > BEAT + OVERSLEPT:  # this process itself was stopped
                coordinator.overslept(now - before, now)
            before = now
            for silence in coordinator.check(now):
                if silence.over:
                    self.fall(_stalled(silence.seconds))
                    return
                log.warning("ps 0 has been silent for %.0f s; waiting for it", silence.seconds)
        self._connection.send({"bye": 1})

    def _hear(self, note: Mapping[str, Any]) -> None:
        if self._stopping.is_set():
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
            self._known.set()
        if "error" in note:
            error = error_of(note)
            if isinstance(error, ReplicaError):
                self.fall(error)


def _stalled(seconds: float) -> ReplicaStalled:
    return ReplicaStalled(
        f"{_COORDINATOR} has not answered for {seconds:.0f} s: its machine, or the network "
        "between, hangs. The last checkpoint is whole; start the job again from there.",
        _COORDINATOR,
    )
