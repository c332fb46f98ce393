"""When replicas check whether a checkpoint is due, and when one is.

Replicas save together, by the chief's clock. So they check at agreed steps, about twice a second:
each check sets the step of the next one by the pace of the steps so far.
"""

from __future__ import annotations

from dataclasses import dataclass

#: target seconds between two checks: how soon a signal to end is noticed
_PACE = 0.5
#: how much longer the interval to the next check may be than the last one
_GROWTH = 4


@dataclass
class CheckpointSchedule:
    """The chief's schedule; it calls `look` at agreed steps with its own time."""

    every: int | None
    seconds: float | None
    #: of the last checkpoint
    saved_step: int
    saved_time: float
    #: of the last check
    step: int = -1
    time: float = 0.0
    #: seconds from one check to the next
    pace: float = _PACE
    _way: int = 1

    def look(self, step: int, now: float) -> bool:
        """Return whether a checkpoint is due."""
        if 0 <= self.step < step:
            steps = (step - self.step) * self.pace / max(now - self.time, 1e-9)
            self._way = max(1, int(min(steps, _GROWTH * self._way)))
        self.step, self.time = step, now
        by_step = self.every is not None and step - self.saved_step >= self.every
        by_time = self.seconds is not None and now - self.saved_time >= self.seconds
        return by_step or by_time

    def saved(self, step: int, now: float) -> None:
        """Note that a checkpoint was made."""
        self.saved_step, self.saved_time = step, now

    def next(self) -> int:
        """Return the step of the next check."""
        found = max(self.step, self.saved_step) + self._way
        if self.every is not None and self.saved_step + self.every > self.step:
            found = min(found, self.saved_step + self.every)
        return found
