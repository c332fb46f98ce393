"""How long threads of this process were ready to run and had no core, from Linux' schedstat."""

from __future__ import annotations

import os
from pathlib import Path

_TASKS = Path("/proc/self/task")


class RunQueue:
    """Reads the time that the process' threads queue for a core."""

    def __init__(self) -> None:
        self._before = _queued()

    def waited(self) -> float:
        """Return the seconds since the last call, of the thread that queued longest; 0.0 where the
        kernel does not count them."""
        before, self._before = self._before, _queued()
        return max((now - before.get(task, now) for task, now in self._before.items()), default=0.0)


def _queued() -> dict[str, float]:
    found: dict[str, float] = {}
    try:
        for task in os.listdir(_TASKS):
            found[task] = int((_TASKS / task / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # a thread has ended, or there is no such file
        pass
    return found
