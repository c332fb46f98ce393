"""Statistics: every push that was received was applied, was dropped, or waits for the gate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stratagem.rules.tickets import Push


@dataclass(frozen=True)
class Stats:
    """Counts so far: received = applied + dropped + buffered, here and by worker.

    abandoned   late workers stopped computing; nothing was pushed
    requeued    tickets that went back to the queue, for whatever reason
    lost        tickets that did not, with requeue=False
    skipped     tickets whose worker made no gradient
    staleness   pushes received, by tau
    waiting     seconds, by worker
    """

    received: int = 0
    applied: int = 0
    dropped: int = 0
    buffered: int = 0
    abandoned: int = 0
    requeued: int = 0
    lost: int = 0
    skipped: int = 0
    updates: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, float] = field(default_factory=dict)
    by_worker: dict[int, dict[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; keys become strings, as JSON demands."""
        return vars(self) | {
            "staleness": {str(tau): count for tau, count in self.staleness.items()},
            "waiting": {str(worker): seconds for worker, seconds in self.waiting.items()},
            "by_worker": {str(worker): dict(tally) for worker, tally in self.by_worker.items()},
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Stats:
        """Read what `to_json` made; keys are numbers again."""
        numbered = {
            name: {int(key): value for key, value in plain[name].items()}
            for name in ("staleness", "waiting", "by_worker")
        }
        return cls(**{**plain, **numbered})


@dataclass(slots=True)
class WorkerStats:
    """The counts of one worker."""

    received: int = 0
    applied: int = 0
    dropped: int = 0
    abandoned: int = 0
    waiting: float = 0.0


class StatsRecorder:
    """Counts the events that `Stats` reports."""

    def __init__(self) -> None:
        self.requeued = 0
        self.lost = 0
        self.skipped = 0
        self.updates = 0
        self._lines: defaultdict[int, WorkerStats] = defaultdict(WorkerStats)
        self._staleness: defaultdict[int, int] = defaultdict(int)

    def open(self, worker: int) -> None:
        """Give a worker a line, if it has none."""
        self._lines[worker]

    def receive(self, worker: int, tau: int, kept: bool) -> None:
        """Count a push that arrived."""
        line = self._lines[worker]
        line.received += 1
        line.dropped += not kept
        self._staleness[tau] += 1

    def apply(self, pushes: Iterable[Push]) -> None:
        """Count kept pushes that made an update."""
        self.updates += 1
        for push in pushes:
            self._lines[push.worker].applied += 1

    def drop(self, pushes: Iterable[Push]) -> None:
        """Count kept pushes that were dropped after all."""
        for push in pushes:
            self._lines[push.worker].dropped += 1

    def abandon(self, worker: int) -> None:
        """Count a ticket that a worker gave up."""
        self._lines[worker].abandoned += 1

    def wait(self, worker: int, seconds: float) -> None:
        """Add the time that a worker waited."""
        self._lines[worker].waiting += seconds

    def stats(self) -> Stats:
        """Return the counts so far."""
        lines = {worker: _line(line) for worker, line in sorted(self._lines.items())}
        sums = {name: sum(line[name] for line in lines.values()) for name in _line(WorkerStats())}
        return Stats(
            **sums,
            requeued=self.requeued,
            lost=self.lost,
            skipped=self.skipped,
            updates=self.updates,
            staleness=dict(sorted(self._staleness.items())),
            waiting={worker: self._lines[worker].waiting for worker in lines},
            by_worker=lines,
        )


def _line(line: WorkerStats) -> dict[str, int]:
    return {
        "received": line.received,
        "applied": line.applied,
        "dropped": line.dropped,
        "buffered": line.received - line.applied - line.dropped,
        "abandoned": line.abandoned,
    }


# --- epoch by epoch: for the logs, and for the history --------------------------------------------
#
# logs       updates, dropped, staleness (the mean), waiting (all workers): numbers, for everybody
# details    staleness_histogram {tau: pushes}, waiting_by_worker {worker: seconds}: history only,
#            since readers of logs expect numbers


Details = dict[str, dict[int, Any]]


class EpochStats:
    """The difference from one epoch to the next."""

    def __init__(self) -> None:
        self._before = Stats()

    def turn(self, stats: Stats | None) -> tuple[dict[str, float], Details]:
        """Return the logs and details of the epoch that is over; none without stats."""
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


def enter_details(history: dict[str, list[Any]], details: Mapping[str, Any]) -> None:
    """Put an epoch's details into a history."""
    for name, value in details.items():
        history.setdefault(name, []).append(value)


def portable_details(details: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    """Return details for other tasks, with text for keys."""
    return {name: {str(key): n for key, n in each.items()} for name, each in details.items()}


def numbered_details(details: Mapping[str, Mapping[str, Any]]) -> Details:
    """Read what `portable_details` made; keys are numbers again."""
    return {name: {int(key): n for key, n in each.items()} for name, each in details.items()}
