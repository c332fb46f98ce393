"""When a training saves: replicas agree on it, at steps known to all, by the chief's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stratagem.rules.checkpoint_schedule import CheckpointSchedule
from stratagem.state.checkpoint_folder import Checkpoints
from stratagem.training.termination import Termination


class CheckpointAgreement:
    """When one training saves, on every process of its loop; the chief alone needs a plan."""

    def __init__(
        self,
        plan: Checkpoints | None,
        step: int,
        agree: Callable[[Any], list[Any]],
        termination: Termination | None = None,
    ) -> None:
        """`termination`: from an earlier try, if that is waiting for SIGTERM."""
        self.termination = Termination() if termination is None else termination
        #: the step at which to look again
        self.next = step + 1
        #: whether a process was asked to end, as of the last call of `due`
        self.terminated = False
        self._agree = agree
        #: the chief's
        self.schedule: CheckpointSchedule | None = None
        if plan is not None:
            now = time.monotonic()
            self.schedule = CheckpointSchedule(plan.every, plan.seconds, step, now)

    def due(self, step: int, *, end_of_epoch: bool = False) -> bool:
        """Return whether a checkpoint is due, and update `terminated`. Collective."""
        mine: dict[str, Any] = {"stop": self.termination.asked, "due": False, "next": 0}
        if (schedule := self.schedule) is not None:
            now = time.monotonic()
            mine["due"] = schedule.look(step, now)
            if end_of_epoch and schedule.every is None and schedule.seconds is None:
                mine["due"] = True
            if mine["due"]:
                schedule.saved(step, now)
            mine["next"] = schedule.next()
        everybody = self._agree(mine)
        self.next = int(everybody[0]["next"])
        self.terminated = any(each["stop"] for each in everybody)
        return bool(everybody[0]["due"])
