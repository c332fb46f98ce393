"""Who has gone silent: the arithmetic of heartbeats, with no clock and no socket of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

BEAT = 0.5  # seconds between heartbeats
STALL = 2.4  # silence after which a member is named: 3 s after a cut at most, with the beat
REMIND = 10.0  # seconds between two lines about the same silence
GIVE_UP = 60.0  # silence after which waiting is over
OVERSLEPT = 1.0  # a loop that ran this much late was itself suspended


#: what a member is known by: its rank, or its connection
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Silence(Generic[Key]):
    """A member that is not heard, for how long, and whether patience has run out."""

    rank: Key
    seconds: float
    over: bool


class Heartbeats(Generic[Key]):
    """When each member was last heard; times are whatever clock the caller reads."""

    def __init__(self, ranks: Iterable[Key], now: float, give_up: float = GIVE_UP) -> None:
        self._heard = dict.fromkeys(ranks, now)
        self._checked = now
        #: seconds that this process itself did not run, as the last check found
        self.overslept = 0.0
        self._remind: dict[Key, float] = {}
        self._give_up = give_up

    def expect(self, rank: Key, now: float) -> None:
        """Listen to one more member from now on."""
        self._heard[rank] = now

    def heard(self, rank: Key, now: float) -> float | None:
        """Note a sign of life; return the length of the silence it ends, if that was named."""
        if rank not in self._heard:
            return None
        silent = now - self._heard[rank]
        self._heard[rank] = now
        return silent if self._remind.pop(rank, None) is not None else None

    def forget(self, rank: Key) -> None:
        """Expect nothing more of a member that left or died."""
        self._heard.pop(rank, None)
        self._remind.pop(rank, None)

    def check(self, now: float) -> list[Silence[Key]]:
        """Return the silences to speak about now; each again every REMIND seconds.

        It is called every BEAT, or sooner. A call that comes late takes our own absence off
        everybody's silence: we were not there to hear them.
        """
        since, self._checked = now - self._checked, now
        self.overslept = since if since > BEAT + OVERSLEPT else 0.0
        if self.overslept:
            self._heard = {k: min(now, last + since) for k, last in self._heard.items()}
        found = []
        for rank, last in self._heard.items():
            silent = now - last
            if silent >= self._give_up:
                found.append(Silence(rank, silent, over=True))
            elif silent >= self._remind.get(rank, STALL):
                self._remind[rank] = silent + REMIND
                found.append(Silence(rank, silent, over=False))
        return found
