"""The workers of a fit, those still expected, and the state of the present epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from stratagem.errors import NotDistributable, ReplicaLost
from stratagem.rules.ledger import Ledger

log = logging.getLogger("stratagem")

#: seconds that the first batch of a training in step waits for expected workers; and for those
#: whose processes are alive but busy, loading their data perhaps
GATHERING, BUSY = 10.0, 60.0


@dataclass(eq=False)
class Participant:
    """A worker that takes part in a fit.

    `tell` sends it a note between two answers, and returns whether that could be done at once.

    Another process may take over the worker's number, after which this one counts no more. The
    placement identifies the process: servers keep its gradient under it.
    """

    worker: int
    name: str
    placement: str
    tell: Callable[[Mapping[str, Any]], bool]
    fit: int
    chief: bool = False
    #: without a heartbeat for a while: stopped, or cut off
    silent: bool = False
    #: whether it was given up; set without the lock
    gone: bool = False


class Participants:
    """The coordinator's list of participants; used under its lock."""

    def __init__(self) -> None:
        self.here: dict[int, Participant] = {}
        #: participants that take no more work, but wait for the end
        self.retired: set[Participant] = set()
        #: workers that left their loop, until they come for another epoch (leaving.py)
        self.left_loop: set[int] = set()
        self.open(0, 0.0)

    def open(self, expected: int, now: float) -> None:
        """Begin a fit with so many workers."""
        self.here.clear()
        self.retired.clear()
        self.left_loop.clear()
        self._expected, self._opened = set(range(expected)), now
        self._came: set[int] = set()
        #: whether the busy workers, and the missing ones, have been logged
        self._asked = self._said = False

    def join(self, participant: Participant) -> None:
        self.here[participant.worker] = participant
        self._came.add(participant.worker)
        self.left_loop.discard(participant.worker)

    def leave(self, participant: Participant) -> None:
        del self.here[participant.worker]
        self.left_loop.discard(participant.worker)

    def refuse(self, participant: Participant) -> NoReturn:
        """Refuse a worker that was given up, or whose place another process has taken."""
        raise ReplicaLost(
            f"{participant.name} counts no more: it was silent too long, or another process has "
            "taken its place. Start it again to take part.",
            participant.name,
        )

    def on_the_way(self, now: float, alive: Callable[[], set[int]]) -> bool:
        """Return whether the fit has just begun, and an expected worker has not come yet.

        `alive` returns the workers whose processes are heard.
        """
        missing, waited = self._expected - self._came, now - self._opened
        if not missing or waited < GATHERING:
            return bool(missing)
        busy = missing & alive() if waited < BUSY else set()
        if busy and not self._asked:
            self._asked = True
            log.warning(
                "waiting for %s, which lives but has not begun to train (loading its data?), "
                "%.0f s; going on without it after %.0f s",
                _names(busy),
                waited,
                BUSY,
            )
        return bool(busy)

    def log_missing(self, now: float) -> None:
        """Log, once per fit, which expected workers have not come."""
        missing, waited = self._expected - self._came, now - self._opened
        if missing and not self._said and waited >= GATHERING:
            self._said = True
            log.warning(
                "the training goes on without %s, which did not come in %.0f s; the others do "
                "its share until it does",
                _names(missing),
                waited,
            )

    @property
    def awake(self) -> bool:
        """Whether any worker is heard."""
        return any(not participant.silent for participant in self.here.values())

    def working(self) -> list[Participant]:
        """Return the workers that have neither retired nor left their loop."""
        return [
            participant
            for worker, participant in self.here.items()
            if participant not in self.retired and worker not in self.left_loop
        ]

    def come_back(self, ledger: Ledger, worker: int) -> None:
        """Give a worker that had left its loop tickets again, unless it has retired."""
        self.left_loop.discard(worker)
        participant = self.here.get(worker)
        if participant is not None and participant not in self.retired:
            ledger.join(worker)

    def refuse_alone(self, worker: int, batch: int, done: dict[int, int]) -> None:
        """Refuse a gradient, in step, of a batch that a worker which left its loop did not do."""
        left = [each for each in self.left_loop if each != worker and done.get(each, -1) < batch]
        if left:
            raise NotDistributable(
                f"worker {left[0]} left its loop over the batches (break?) earlier than worker "
                f"{worker}, and in step all leave it at the same batch: let the number of the "
                "batch decide, not the loss of one's own part; or use updates=sg.Asynchronous()."
            )


def _names(workers: set[int]) -> str:
    return ", ".join(f"worker {each}" for each in sorted(workers))


@dataclass
class AppliedLoss:
    """The loss over all examples whose gradients were applied."""

    total: float = 0.0
    examples: int = 0
    waiting: list[tuple[float, float, int]] = field(default_factory=list)

    def fold(self) -> None:
        """Add the loss of an applied batch, weighted by examples."""
        weight, count, total = 0.0, 0, 0.0
        for loss, w, n in self.waiting:
            weight, count = weight + w, count + n
            total += loss * w if w else 0.0  # where nothing weighs, its loss may be no number
        if weight and count:
            self.total += total / weight * count
            self.examples += count
        self.waiting = []


@dataclass
class Epoch:
    """One pass of the chief over its batches."""

    number: int = 0
    #: whether all its batches have been dealt
    dealt: bool = False
    #: by a ticket's serial: its examples, where the chief sends them
    payloads: dict[int, Tensor] = field(default_factory=dict)
    #: by worker: its report
    reports: dict[int, Tensor] = field(default_factory=dict)
    #: workers whose last part was dropped again (leaving.py)
    void: set[int] = field(default_factory=set)
    tally: AppliedLoss = field(default_factory=AppliedLoss)
