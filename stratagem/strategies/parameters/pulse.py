"""A task's pulse: the lead hears that it lives, and it hears of the lead and of the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from stratagem.cluster.pulse import BEAT, OVERSLEPT, STALL
from stratagem.errors import ReplicaError, ReplicaLost, ReplicaStalled
from stratagem.wire.tcp import Connection

log = logging.getLogger("stratagem")


class PulseThread:
    """Beats on a connection of its own; `trouble` is set when the job cannot go on."""

    def __init__(self, connection: Connection, give_up: float) -> None:
        self.trouble: ReplicaError | None = None
        self._connection = connection
        self._give_up = give_up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stratagem-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye."""
        self._stopping.set()
        self._thread.join(2.0)
        self._connection.close()

    def _run(self) -> None:
        try:
            self._beat()
        except OSError as problem:
            self._fall(ReplicaLost(
                f"ps 0 is gone ({problem}), so the job ends. Its own output says why; the last "
                "checkpoint is whole. Start the job again from there.", "ps 0",
            ))  # fmt: skip

    def _beat(self) -> None:
        heard, named, before = time.monotonic(), False, time.monotonic()
        while not self._stopping.is_set():
            self._connection.send({"beat": 1})
            until = time.monotonic() + BEAT
            while (left := until - time.monotonic()) > 0 and not self._stopping.is_set():
                if self._connection.readable(min(left, 0.1)):
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
                self._fall(ReplicaStalled(
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
        if "say" in note:
            log.warning("%s", note["say"])
        if "failed" in note:
            self._fall(ReplicaLost(str(note["failed"]), str(note.get("who", ""))))

    def _fall(self, trouble: ReplicaError) -> None:
        if self.trouble is None and not self._stopping.is_set():
            self.trouble = trouble
            log.warning("%s", trouble)
