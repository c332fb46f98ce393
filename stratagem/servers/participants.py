"""Who takes part in a fit, who is still on the way, who has stopped; and its present epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from stratagem.errors import NotDistributable, ReplicaLost
from stratagem.rules.ledger import Ledger

log = logging.getLogger("stratagem")

#: how long the first batch of a training in step waits for who is expected, in seconds; and for
#: those whose processes are here, busy with something else: they may be loading their data
GATHERING, BUSY = 10.0, 60.0


@dataclass(eq=False)
class Participant:
    """A worker that takes part in a fit.

    `tell` sends it a word between two answers, if that can be done at once; whether it was.

    Another process may take over the worker's number, after which this one counts no more. The
    placement is the process's own: under it servers keep the gradients that it has laid down.
    """

    worker: int
    name: str
    placement: str
    tell: Callable[[Mapping[str, Any]], bool]
    fit: int
    chief: bool = False
    #: not heard of for a while: stopped, or cut off
    silent: bool = False
    #: given up; set without the lock
    gone: bool = False


class Participants:
    """The list that the coordinator keeps; changed and read under its lock."""

    def __init__(self) -> None:
        self.here: dict[int, Participant] = {}
        #: who takes no more work, but waits for the end
        self.retired: set[Participant] = set()
        #: workers whose loop was left, until they come for the next epoch
        self.aside: set[int] = set()
        self.open(0, 0.0)

    def open(self, expected: int, now: float) -> None:
        """A fit begins, for so many workers."""
        self.here.clear()
        self.retired.clear()
        self.aside.clear()
        self._expected, self._opened = set(range(expected)), now
        self._came: set[int] = set()
        #: whether it has been said who is waited for, and who did not come
        self._asked = self._said = False

    def join(self, participant: Participant) -> None:
        self.here[participant.worker] = participant
        self._came.add(participant.worker)
        self.aside.discard(participant.worker)

    def leave(self, participant: Participant) -> None:
        del self.here[participant.worker]
        self.aside.discard(participant.worker)

    def refuse(self, participant: Participant) -> NoReturn:
        """Refuse a worker that was given up, or whose place another process has taken."""
        raise ReplicaLost(
            f"{participant.name} counts no more: it was silent too long, or another process has "
            "taken its place. Start it again to take part.",
            participant.name,
        )

    def on_the_way(self, now: float, alive: Callable[[], set[int]]) -> bool:
        """Whether the fit has just begun, and an expected worker has not come yet.

        `alive` tells whose processes are here.
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

    def say_who_is_missing(self, now: float) -> None:
        """Log once a fit which expected workers have not come."""
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
        """Return the workers that neither have retired nor stand aside."""
        return [
            participant
            for worker, participant in self.here.items()
            if participant not in self.retired and worker not in self.aside
        ]

    def nobody_works(self, ledger: Ledger, chief: Participant | None) -> bool:
        """Whether all workers but the chief have left their loops, and none holds a ticket."""
        return not [p for p in self.working() if p is not chief] and not ledger.states.held

    def come_back(self, ledger: Ledger, worker: int) -> None:
        """Give a worker that stood aside tickets again, unless it has retired."""
        self.aside.discard(worker)
        participant = self.here.get(worker)
        if participant is not None and participant not in self.retired:
            ledger.join(worker)

    def refuse_alone(self, worker: int, batch: int, done: dict[int, int]) -> None:
        """Refuse to go on, in step, where another worker has left its loop."""
        left = [each for each in self.aside if each != worker and done.get(each, -1) < batch]
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
    #: whether all its batches have been put up
    dealt: bool = False
    #: by a ticket's serial: the examples to go with it, where the chief hands them out
    payloads: dict[int, Tensor] = field(default_factory=dict)
    #: by worker: what it has counted
    reports: dict[int, Tensor] = field(default_factory=dict)
    #: workers whose last part was dropped again
    void: set[int] = field(default_factory=set)
    tally: AppliedLoss = field(default_factory=AppliedLoss)
