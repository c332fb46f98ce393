"""Replicas that train by themselves (`sync=`) and are left, or joined, by others between meetings.

Who is left goes on by itself until replicas next talk to each other: at a meeting, as a rule. There
the meeting is held by those who are here: the mean is over those with as many updates as the chief,
each counted once, and what the dead had done since the last meeting is lost with them. One that is
new takes the weights of the last meeting, with no way of its own, and so what comes of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stratagem.codecs.feedback import Feedback
from stratagem.codecs.reducer import Reducer


@dataclass
class BrokenRound:
    """What one replica had when a round broke off."""

    meetings: int
    updates: int
    #: of each part of the model, how many updates have not met
    unmet: list[int]
    #: by parameter: as it was at the last meeting, and as it is here
    old: dict[str, Tensor]
    mine: dict[str, Tensor]
    momenta: dict[str, Tensor]
    #: the inner optimizer's state, and what the wires of meetings go on from
    optimizer: list[Any]
    wires: list[Reducer]
    #: losses and metrics of which the others do not know
    untold: Any = None
    #: weights and optimizer before the last update, where that may have to be undone
    earlier: tuple[dict[str, Tensor], list[Any]] | None = None
    #: whether it has gone on alone: then its weights are those of the model
    alone: bool = False

    @property
    def count(self) -> list[int]:
        """How far it had come, whether in a round (one that is alone has none to end), and by how
        many updates it can go back."""
        apart = any(self.unmet) and not self.alone
        return [self.meetings, self.updates, int(apart), int(self.earlier is not None)]

    def go_back_to(self, updates: int) -> None:
        """Undo the last update, if the others have not made it."""
        if self.earlier is not None and self.updates == updates + 1:
            self.mine, self.optimizer = self.earlier
            self.updates, self.earlier = updates, None

    def go_alone(self) -> None:
        """Nobody else is here, and what one replica does is its own; momenta wait for others."""
        self.meetings, self.alone = self.meetings + 1, True

    def shared(self) -> dict[str, Any]:
        """What is the same on all that have come as far."""
        steps = [wire.steps if isinstance(wire, Feedback) else 0 for wire in self.wires]
        return {"old": self.old, "momenta": self.momenta, "unmet": self.unmet, "steps": steps}


def furthest(counts: Sequence[list[int] | None]) -> int | None:
    """Whose meetings count: the chief's, or those of one that has ended one more; None: nobody's.

    The last meeting may be over for some and broken off for others; its sum had everybody's part.
    """
    if counts[0] is None:
        return None
    most = max(each[0] for each in counts if each is not None)
    return next(rank for rank, each in enumerate(counts) if each is not None and each[0] == most)


def comes_as_far(mine: list[int] | None, chief: list[int]) -> bool:
    """Whether a replica has, or can go back to, as many updates as the chief."""
    return mine is not None and mine[0] == chief[0] and mine[1] - mine[3] <= chief[1] <= mine[1]


def rejoin_wire(wire: Reducer, before: Reducer | None, steps: int, gather: Any) -> None:
    """Go on with what a meeting's wire has kept. `gather` returns everybody's. Collective."""
    if not isinstance(wire, Feedback):
        return
    kept = before.state_at(steps).get("kept", {}) if isinstance(before, Feedback) else {}
    shared = {name: kept[name] for name in ("of_sums", "factors") if name in kept}
    wire.rejoin(steps, kept, gather(shared))
