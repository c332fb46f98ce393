"""Followers that are forked before they are needed: where replicas may die, nobody waits."""

from __future__ import annotations

import threading

from stratagem.errors import ReplicaLost
from stratagem.replicas.pool import Follower
from stratagem.replicas.zygote import ZygoteProcess

_LATER = 0.1  # seconds in which those who have just come together need the processors


class Spares:
    """Followers without a name or work; made in the background, one set at a time."""

    def __init__(self) -> None:
        self._waiting: list[Follower] = []
        self._thread: threading.Thread | None = None
        self._open = True
        self._hurry = threading.Event()

    def prepare(self, count: int) -> None:
        """Have as many as that, soon."""
        self._join()
        self._hurry.clear()
        if len(self._waiting) < count and self._open:
            missing = count - len(self._waiting)
            self._thread = threading.Thread(target=self._fork, args=(missing,), daemon=True)
            self._thread.start()

    def preload(self, call: bytes) -> None:
        """Have them import what this call needs, beside it: the next one will need it, too."""
        before = self._thread
        if before is None and all(one.preloaded for one in self._waiting):
            return

        def run() -> None:
            if before is not None:
                before.join()
            for one in self._waiting:
                if not one.preloaded:
                    one.preload(call)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def take(self, names: list[str]) -> list[Follower]:
        """Give these names to those who wait, as far as there are any; where the settings of this
        process have changed since they were forked, none."""
        self._join()
        now = ZygoteProcess.setting()
        if any(one.setting != now or not one.waits() for one in self._waiting):
            self._end_waiting()
        taken = self._waiting[: len(names)]
        del self._waiting[: len(taken)]
        for one, name in zip(taken, names, strict=False):
            one.name = name
        return taken

    def end(self) -> None:
        """End those who wait, for good."""
        self._open = False
        self._join()
        self._end_waiting()

    def _fork(self, count: int) -> None:
        self._hurry.wait(_LATER)
        for _ in range(count):
            if not self._open:
                return
            try:
                self._waiting.append(Follower("a spare replica"))
            except (OSError, ReplicaLost):  # whoever needs one forks it, and hears why not
                return

    def _join(self) -> None:
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _end_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            ZygoteProcess.get().end([one.pid for one in waiting])
        for one in waiting:
            one.close(pipes=True)
