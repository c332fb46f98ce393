"""Attendance: who takes part in a fit, who is still on the way, and who has stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from stratagem.errors import NotDistributable, ReplicaLost
from stratagem.strategies.parameters.parties import Attendee

log = logging.getLogger("stratagem")

#: how long the first batch of a training in step waits for who is expected, in seconds; and for
#: those whose processes are here, busy with something else: they may be loading their data
GATHERING, BUSY = 10.0, 60.0


class Attendance:
    """The list that the lead keeps; changed and read under its lock."""

    def __init__(self) -> None:
        self.here: dict[int, Attendee] = {}
        #: who takes no more work, but waits for the end
        self.retired: set[Attendee] = set()
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

    def join(self, attendee: Attendee) -> None:
        self.here[attendee.worker] = attendee
        self._came.add(attendee.worker)
        self.aside.discard(attendee.worker)

    def leave(self, attendee: Attendee) -> None:
        del self.here[attendee.worker]
        self.aside.discard(attendee.worker)

    def refuse(self, attendee: Attendee) -> NoReturn:
        """One that was given up, or whose place another process has taken."""
        raise ReplicaLost(
            f"{attendee.name} counts no more: it was silent too long, or another process has "
            "taken its place. Start it again to take part.", attendee.name,
        )  # fmt: skip

    def on_the_way(self, now: float, alive: Callable[[], set[int]]) -> bool:
        """Whether the fit has just begun, and somebody who is expected has not come yet.

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
                "%.0f s; going on without it after %.0f s", _names(busy), waited, BUSY,
            )  # fmt: skip
        return bool(busy)

    def say_who_is_missing(self, now: float) -> None:
        """Once a fit, if somebody who is expected has not come."""
        missing, waited = self._expected - self._came, now - self._opened
        if missing and not self._said and waited >= GATHERING:
            self._said = True
            log.warning(
                "the training goes on without %s, which did not come in %.0f s; the others do "
                "its share until it does", _names(missing), waited,
            )  # fmt: skip

    @property
    def awake(self) -> bool:
        """Whether anybody here is heard of."""
        return any(not attendee.silent for attendee in self.here.values())

    def working(self) -> list[Attendee]:
        """Who is here, and neither has retired nor stands aside."""
        return [
            attendee for worker, attendee in self.here.items()
            if attendee not in self.retired and worker not in self.aside
        ]  # fmt: skip

    def come_back(self, worker: int) -> bool:
        """Somebody stands aside no more; whether work is for it again."""
        self.aside.discard(worker)
        attendee = self.here.get(worker)
        return attendee is not None and attendee not in self.retired

    def refuse_alone(self, worker: int, batch: int, done: dict[int, int]) -> None:
        """In step nobody goes on where another has left: one device would do either."""
        left = [each for each in self.aside if each != worker and done.get(each, -1) < batch]
        if left:
            raise NotDistributable(
                f"worker {left[0]} left its loop over the batches (break?) earlier than worker "
                f"{worker}, and in step all leave it at the same batch: let the number of the "
                "batch decide, not the loss of one's own part; or use updates=sg.Asynchronous()."
            )


def _names(workers: set[int]) -> str:
    return ", ".join(f"worker {each}" for each in sorted(workers))
