"""A task's pulse: the lead hears that it lives, and it hears of the lead and of the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.pulse import BEAT, OVERSLEPT, STALL
from stratagem.errors import ReplicaError, ReplicaStalled
from stratagem.strategies.parameters.trouble import error_of, lost, note_of
from stratagem.wire.tcp import Connection

log = logging.getLogger("stratagem")

KNOWS_BETTER = 1.0  # seconds until the pulse knows why a connection has closed
_LOOK = 0.1  # seconds after which a goodbye is noticed


class PulseThread:
    """Beats on a connection of its own.

    `trouble` is set when the job cannot go on, and `on_trouble` called with it, once: whoever
    waits for a server that will not answer has to be woken.
    """

    def __init__(
        self, connection: Connection, give_up: float, on_trouble: Callable[[ReplicaError], None]
    ) -> None:
        self.trouble: ReplicaError | None = None
        #: names of tasks that the lead does not hear at present
        self.silent: set[str] = set()
        #: names of workers that the lead has given up; whoever acts on it takes them out
        self.given_up: set[str] = set()
        self._known, self._falling = threading.Event(), threading.Lock()
        self._connection = connection
        self._give_up = give_up
        self._on_trouble = on_trouble
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stratagem-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        self._connection.close()

    def mute(self) -> None:
        """From now on the end of the lead is no news."""
        self._stopping.set()

    def last_words(self, error: ReplicaError) -> None:
        """Say why this task ends."""
        try:
            self._connection.send({"dying": note_of(error)})
        except OSError as problem:
            log.info("the lead did not hear of the failure: %s", problem)

    def explain(self, seconds: float) -> ReplicaError | None:
        """What is wrong, if that is known within so many seconds."""
        self._known.wait(seconds)
        return self.trouble

    def fall(self, trouble: ReplicaError) -> None:
        """The job cannot go on; what is told first counts."""
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
            self.fall(lost("ps 0", str(problem)))
        finally:
            self._known.set()

    def _beat(self) -> None:
        heard, named, before = time.monotonic(), False, time.monotonic()
        while not self._stopping.is_set():
            self._connection.send({"beat": 1})
            until = time.monotonic() + BEAT
            while (left := until - time.monotonic()) > 0 and not self._stopping.is_set():
                if self._connection.readable(min(left, _LOOK)):
                    frame = self._connection.receive()
                    if frame is None:
                        raise ConnectionResetError("its connection closed")
                    heard, named = time.monotonic(), False
                    self._hear(frame.header)
            now = time.monotonic()
            if now - before > BEAT + OVERSLEPT:
                heard = now  # this process itself was stopped
            before = now
            if now - heard > self._give_up:
                self.fall(ReplicaStalled(
                    f"ps 0 has not answered for {now - heard:.0f} s: its machine, or the network "
                    "between, hangs. The last checkpoint is whole; start the job again from there.",
                    "ps 0",
                ))  # fmt: skip
                return
            if now - heard > STALL and not named:
                named = True
                log.warning("ps 0 has been silent for %.0f s; waiting for it", now - heard)
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
        if "error" in note:
            error = error_of(note)
            if isinstance(error, ReplicaError):
                self.fall(error)
