"""The arithmetic of heartbeats, without a clock or a socket: which members have gone silent."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

BEAT = 0.5  # seconds between heartbeats
STALL = 2.4  # seconds of silence until a member is named: with the beat, at most 3 s after a cut
REMIND = 10.0  # seconds between two lines about the same silence
GIVE_UP = 60.0  # seconds of silence after which a member is given up
OVERSLEPT = 1.0  # seconds by which a loop is late that must have been suspended itself


#: identifies a member: its rank, or its connection
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Silence(Generic[Key]):
    """A silent member, the length of its silence, and whether it is to be given up."""

    rank: Key
    seconds: float
    over: bool


class Heartbeats(Generic[Key]):
    """When each member was last heard, in the time of the caller's clock."""

    def __init__(self, ranks: Iterable[Key], now: float, give_up: float = GIVE_UP) -> None:
        self._heard = dict.fromkeys(ranks, now)
        self._checked = now
        #: seconds that this process itself did not run before the last check
        self.overslept = 0.0
        self._remind: dict[Key, float] = {}
        self._give_up = give_up

    def expect(self, rank: Key, now: float) -> None:
        """Watch one more member."""
        self._heard[rank] = now

    def heard(self, rank: Key, now: float) -> float | None:
        """Note a sign of life; return the length of the silence that it ends, if it was named."""
        if rank not in self._heard:
            return None
        silent = now - self._heard[rank]
        self._heard[rank] = now
        return silent if self._remind.pop(rank, None) is not None else None

    def forget(self, rank: Key) -> None:
        """Stop watching a member that left or died."""
        self._heard.pop(rank, None)
        self._remind.pop(rank, None)

    def check(self, now: float) -> list[Silence[Key]]:
        """Return the silences to log now; each again every REMIND seconds.

        Call it every BEAT seconds or more often. After a late call, the time in which this process
        did not run is not counted as silence: it could not have heard a member.
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
