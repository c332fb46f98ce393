"""What servers have counted, epoch by epoch: for the logs, and for the history.

logs       updates, dropped, staleness (the mean), waiting (all workers): numbers, for everybody
details    staleness_histogram {tau: pushes}, waiting_by_worker {worker: seconds}: history only,
           since whoever shows or draws logs expects numbers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.rules.stats import Stats

Details = dict[str, dict[int, Any]]


class EpochStats:
    """The difference from one epoch to the next."""

    def __init__(self) -> None:
        self._before = Stats()

    def turn(self, stats: Stats | None) -> tuple[dict[str, float], Details]:
        """Logs and details of the epoch that is over; nothing where there are no books."""
        if stats is None:
            return {}, {}
        before, self._before = self._before, stats
        ages = _since(before.staleness, stats.staleness)
        waiting = _since(before.waiting, stats.waiting)
        received = sum(ages.values())
        logs = {
            "updates": stats.updates - before.updates,
            "dropped": stats.dropped - before.dropped,
            "waiting": float(sum(waiting.values())),
            "staleness": sum(tau * n for tau, n in ages.items()) / received if received else 0.0,
        }
        details: Details = {
            "staleness_histogram": {tau: n for tau, n in ages.items() if n},
            "waiting_by_worker": waiting,
        }
        return logs, details


def _since(before: Mapping[int, Any], now: Mapping[int, Any]) -> dict[int, Any]:
    return {key: value - before.get(key, 0) for key, value in now.items()}


def enter(history: dict[str, list[Any]], details: Mapping[str, Any]) -> None:
    """Put an epoch's details into a history."""
    for name, value in details.items():
        history.setdefault(name, []).append(value)


def portable(details: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    """For other tasks: keys are text on the way."""
    return {name: {str(key): n for key, n in each.items()} for name, each in details.items()}


def numbered(details: Mapping[str, Mapping[str, Any]]) -> Details:
    """What `portable` made, with numbers for keys again."""
    return {name: {int(key): n for key, n in each.items()} for name, each in details.items()}
