"""Replicas that train by themselves (`sync=`) and are left, or joined, by others between meetings.

Who is left goes on by itself until replicas next talk to each other: at a meeting, as a rule. There
the meeting is held by those who are here: the mean is over those with as many updates as the chief,
each counted once, and what the dead had done since the last meeting is lost with them. One that is
new takes the weights of the last meeting, with no way of its own, and so what comes of this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stratagem.codecs.feedback import Feedback
from stratagem.codecs.reducer import Reducer
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree


@dataclass(frozen=True)
class KeptWire:
    """What a wire had kept after so many steps."""

    steps: int
    state: Mapping[str, Any]

    def state_at(self, steps: int) -> Mapping[str, Any]:
        return self.state if steps == self.steps else {}

    @property
    def at(self) -> list[int]:
        return [0, self.steps]


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
    wires: list[Reducer | KeptWire]
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

    @property
    def at(self) -> list[int] | None:
        """Meetings and updates; None where it has gone on alone."""
        return None if self.alone else [self.meetings, self.updates]

    def go_back_to(self, updates: int) -> None:
        """Undo the last update, if the others have not made it."""
        if self.earlier is not None and self.updates == updates + 1:
            self.mine, self.optimizer = self.earlier
            self.updates, self.earlier = updates, None

    def catch_up(
        self, told: Mapping[str, Any], fragments: Sequence[Sequence[str]], mix: float
    ) -> None:
        """End the meeting that broke off here, as others have: its sum had this replica's part.

        `told` is `shared` of one of them, `fragments` the parameters of each part of the model.
        """
        for names, here, there in zip(fragments, self.unmet, told["unmet"], strict=True):
            for name in names if here > there else ():
                new, own = told["old"][name], self.mine[name]
                # what was done while it travelled is counted there, if anything of it is kept
                kept = own.to(new.dtype) * mix
                self.mine[name] = kept.add_(new, alpha=1.0 - mix) if there else new

    def go_alone(self) -> None:
        """Nobody else is here, and what one replica does is its own; momenta wait for others."""
        if not self.alone:
            self.meetings, self.alone = self.meetings + 1, True

    def shared(self) -> dict[str, Any]:
        """What is the same on all that have come as far."""
        keeps = (Feedback, KeptWire)
        steps = [wire.steps if isinstance(wire, keeps) else 0 for wire in self.wires]
        return {"old": self.old, "momenta": self.momenta, "unmet": self.unmet, "steps": steps}


def furthest(counts: Sequence[list[int] | None]) -> int | None:
    """Whose meetings count: the chief's, or those of one that has ended one more; None: nobody's.

    The last meeting may be over for some and broken off for others; its sum had everybody's part.
    """
    if counts[0] is None:
        return None
    most = max(each[0] for each in counts if each is not None)
    return next(rank for rank, each in enumerate(counts) if each is not None and each[0] == most)


def comes_as_far(mine: list[int] | None, updates: int, meetings: int) -> bool:
    """Whether a replica has, or can go back to, so many updates, and took part in the last of so
    many meetings, whether that ended here or broke off."""
    if mine is None or mine[0] < meetings - 1:
        return False
    return mine[1] - mine[3] <= updates <= mine[1]


def rejoin_wire(wire: Reducer, before: Reducer | KeptWire | None, steps: int, gather: Any) -> None:
    """Go on with what a meeting's wire has kept. `gather` returns everybody's. Collective."""
    if not isinstance(wire, Feedback):
        return
    keeps = isinstance(before, Feedback | KeptWire)
    kept = before.state_at(steps).get("kept", {}) if keeps else {}  # type: ignore[union-attr]
    shared = {name: kept[name] for name in ("of_sums", "factors") if name in kept}
    wire.rejoin(steps, kept, gather(shared))


class LoopRounds:
    """What this process goes on from in a custom loop: its own state after the last updates.

    A loop is begun again where the chief was after its last whole batch. Another replica may have
    come further: by a batch, or by a round, if it met the chief and heard of a death later.
    """

    def __init__(self) -> None:
        self._keeper: Any = None
        #: after the last two whole batches; before and after the last meeting
        self._last: list[BrokenRound | KeptWire] = []
        self._around: list[BrokenRound | KeptWire] = []
        #: after an update in the batch that broke off
        self._unfinished: list[BrokenRound | KeptWire] = []

    def keep(self, keeper: Any, made: int = 0) -> None:
        """A batch that ended with an update is done with. One that is alone counts those `made`."""
        mark = None if keeper is None else self._mark(keeper)
        if mark is None:
            if isinstance(self.own, BrokenRound) and self.own.alone:
                self.own.updates += made
            return
        if self._last and isinstance(mark, BrokenRound) and _meetings(mark, self._last[-1]):
            self._around = [self._last[-1], mark]
        self._keeper, self._last, self._unfinished = keeper, [*self._last[-1:], mark], []

    def break_off(self) -> None:
        """Others have left or joined in the midst of a batch; its update may have been made."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return  # it broke off before, and no batch was done since
        mark = self._mark(keeper)
        self._unfinished = [] if mark is None else [mark]

    def _mark(self, keeper: Any) -> BrokenRound | KeptWire | None:
        before = self._last[-1] if self._last else None
        found: BrokenRound | Feedback | None = keeper.broken_off(before)
        if not isinstance(found, BrokenRound):
            return None if found is None else _copied(found, before)
        befores = before.wires if isinstance(before, BrokenRound) else [None] * len(found.wires)
        found.wires = [_copied(*both) for both in zip(found.wires, befores, strict=True)]
        return found

    @property
    def own(self) -> BrokenRound | KeptWire | None:
        """After the last whole batch."""
        return self._last[-1] if self._last else None

    def find(self, chief: list[int]) -> BrokenRound | KeptWire | None:
        """Where this process was after as many updates as the chief; not beyond its meetings."""
        known = [*self._around, *self._last, *self._unfinished]
        alike = [m for m in known if (at := m.at) and at[1] == chief[1] and at[0] <= chief[0]]
        return max(alike, key=lambda mark: mark.at or [0], default=None)


def _meetings(mark: BrokenRound, before: BrokenRound | KeptWire) -> bool:
    return isinstance(before, BrokenRound) and mark.meetings > before.meetings


def _copied(wire: Any, before: Any = None) -> Any:
    """What a wire keeps, as it is now; the copy before if nothing was sent since."""
    if not isinstance(wire, Feedback):
        return wire
    same = isinstance(before, KeptWire) and before.steps == wire.steps
    return before if same else KeptWire(wire.steps, wire.state())


def rejoin_loop(rounds: LoopRounds | None, keeper: Any, replica: Replica) -> None:
    """Go on in a custom loop, among others than before, from where the chief was. Collective."""
    own = None if rounds is None else rounds.own
    if replica.count == 1:
        if isinstance(own, BrokenRound):
            own.go_alone()
        return
    leads = replica.collective.rank == 0
    chief = broadcast_tree(replica.collective, own.at if leads and own is not None else None)
    if not leads:
        own = None if chief is None or rounds is None else rounds.find(chief)
    keeper.rejoin(own, replica)
