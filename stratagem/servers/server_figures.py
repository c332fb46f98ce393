"""Lines of figures about one server, for the run's folder."""

from __future__ import annotations

import time

from stratagem.figures.recorder import PERIOD, recorder
from stratagem.servers.coordinator import Coordinator
from stratagem.servers.shard import Shard


class ServerFigures:
    """Writes a server's lines of figures."""

    def __init__(self, task: str) -> None:
        self._recorder = recorder(task)
        self._due, self._version = time.monotonic(), 0
        self._received = self._stale = 0

    def look(self, shard: Shard, coordinator: Coordinator | None) -> None:
        """Write a line if a second has passed."""
        now = time.monotonic()
        if self._recorder is None or now < self._due:
            return
        seconds, self._due = now - self._due + PERIOD, now + PERIOD
        before, self._version = self._version, shard.store.version if shard.plan else 0
        made = max(0, self._version - before)
        self._recorder.write(
            step=self._version,
            steps=made,
            updates=round(made / seconds, 2),
            staleness=self._staleness(coordinator),
        )

    def _staleness(self, coordinator: Coordinator | None) -> float | None:
        """Return the mean staleness of pushes since the last line; None but at the coordinator."""
        if coordinator is None or coordinator.ledger is None:
            return None
        with coordinator.changed:
            ages = coordinator.ledger.recorder.stats().staleness
        received, stale = sum(ages.values()), sum(tau * n for tau, n in ages.items())
        pushes, behind = received - self._received, stale - self._stale
        self._received, self._stale = received, stale
        return round(behind / pushes, 3) if pushes > 0 else None
