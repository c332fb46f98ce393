"""A round of `sync=` that breaks off because replicas have died or joined since the last meeting.

The survivors train on by themselves until they next communicate: at a meeting, as a rule. They hold
it among themselves: it takes the mean over the replicas with as many updates as the chief, each
counted once; what a dead replica did since the last meeting is lost. A new replica starts from the
weights of the last meeting, and takes the result of this one.

What a process goes on from is kept, in `fit`, by `lossy_wire.py`: one state, from when the round
broke off. A custom loop may break off at any line, so `LoopRounds` keeps the last few states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from stratagem.codecs.feedback import Feedback
from stratagem.codecs.reducer import Reducer
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree, gather_tree


class OwnState(NamedTuple):
    """The weights of one replica, by parameter, and the state of its optimizer."""

    weights: dict[str, Tensor]
    optimizer: list[Any]


class RoundProgress(NamedTuple):
    """How far one replica had come when a round broke off."""

    meetings: int
    updates: int
    #: whether it has updates of which no meeting knows; a replica that went on alone has none
    apart: bool
    #: whether it can undo its last update
    can_go_back: bool

    def reaches(self, updates: int, meetings: int) -> bool:
        """Whether the replica has made so many updates, or one more that it can undo, and took part
        in the last of so many meetings, whether that ended here or broke off."""
        least = self.updates - self.can_go_back
        return self.meetings >= meetings - 1 and least <= updates <= self.updates


class RoundState(NamedTuple):
    """The part of a broken round that is the same on all replicas that have come as far."""

    #: weights at the last meeting, by parameter, and the outer momenta
    old: dict[str, Tensor]
    momenta: dict[str, Tensor]
    #: of each fragment: updates since its last meeting, and steps of its wire
    unmet: list[int]
    steps: list[int]


@dataclass(frozen=True)
class KeptWire:
    """What a lossy wire keeps after so many steps."""

    steps: int
    state: Mapping[str, Any]

    def state_at(self, steps: int) -> Mapping[str, Any]:
        return self.state if steps == self.steps else {}

    @property
    def at(self) -> tuple[int, int]:
        return 0, self.steps


@dataclass
class BrokenRound:
    """What one replica had when a round broke off."""

    meetings: int
    updates: int
    #: of each fragment, the updates since its last meeting
    unmet: list[int]
    #: weights at the last meeting, by parameter
    old: dict[str, Tensor]
    mine: OwnState
    momenta: dict[str, Tensor]
    #: the state of the wire of each fragment
    wires: list[Reducer | KeptWire]
    #: losses and metrics that the other replicas have not received
    untold: Any = None
    #: the state before the last update, where that may have to be undone
    earlier: OwnState | None = None
    #: whether this replica has gone on alone, so that its weights are those of the model
    alone: bool = False

    @property
    def progress(self) -> RoundProgress:
        apart = any(self.unmet) and not self.alone
        return RoundProgress(self.meetings, self.updates, apart, self.earlier is not None)

    @property
    def at(self) -> tuple[int, int] | None:
        """Meetings and updates; None for a replica that has gone on alone."""
        return None if self.alone else (self.meetings, self.updates)

    def go_back_to(self, updates: int) -> None:
        """Undo the last update, if the chief has not made it."""
        if self.earlier is not None and self.updates == updates + 1:
            self.mine, self.updates, self.earlier = self.earlier, updates, None

    def catch_up(self, theirs: RoundState, fragments: Sequence[Sequence[str]], mix: float) -> None:
        """End the meeting that broke off here and ended elsewhere: this replica is in its sum.

        `theirs` is the state of a replica on which it ended; `fragments` lists the parameters of
        each fragment.
        """
        weights = self.mine.weights
        for names, here, there in zip(fragments, self.unmet, theirs.unmet, strict=True):
            for name in names if here > there else ():
                new, own = theirs.old[name], weights[name]
                # `there` counts the updates made while the fragment travelled, if any are kept
                kept = own.to(new.dtype) * mix
                weights[name] = kept.add_(new, alpha=1.0 - mix) if there else new

    def go_alone(self) -> None:
        """Go on as the only replica; momenta stay as they are until others join."""
        if not self.alone:
            self.meetings, self.alone = self.meetings + 1, True

    def shared(self) -> RoundState:
        keeps = (Feedback, KeptWire)
        steps = [wire.steps if isinstance(wire, keeps) else 0 for wire in self.wires]
        return RoundState(self.old, self.momenta, self.unmet, steps)


def gather_progress(mine: BrokenRound | None, replica: Replica) -> list[RoundProgress | None]:
    """Gather the progress of all replicas; None for new ones. Collective."""
    own = None if mine is None else list(mine.progress)
    gathered = gather_tree(replica.collective, own)
    return [None if each is None else RoundProgress(*each) for each in gathered]


def furthest(progress: Sequence[RoundProgress | None]) -> int | None:
    """Return the rank whose meetings count: the chief, or a replica that has ended one more.

    The last meeting may be over on some replicas and broken off on others; all are in its sum.
    None where the chief had not begun.
    """
    if progress[0] is None:
        return None
    meetings = [-1 if each is None else each.meetings for each in progress]
    return meetings.index(max(meetings))


def rejoin_wire(wire: Reducer, before: Reducer | KeptWire | None, steps: int, gather: Any) -> None:
    """Go on with what a meeting's wire keeps; `gather` gathers over replicas. Collective."""
    if not isinstance(wire, Feedback):
        return
    keeps = isinstance(before, Feedback | KeptWire)
    kept = before.state_at(steps).get("kept", {}) if keeps else {}  # type: ignore[union-attr]
    shared = {name: kept[name] for name in ("of_sums", "factors") if name in kept}
    wire.rejoin(steps, kept, gather(shared))


class LoopRounds:
    """What this process goes on from in a custom loop: its own state after the last updates.

    A loop is begun again from where the chief was after its last whole batch. Another replica may
    be ahead of the chief: by a batch, or by a round, if it met the chief and learned of a death
    later.
    """

    def __init__(self) -> None:
        self._keeper: Any = None
        #: after the last two whole batches; before and after the last meeting
        self._last: list[BrokenRound | KeptWire] = []
        self._around: list[BrokenRound | KeptWire] = []
        #: after an update in the batch that broke off
        self._unfinished: list[BrokenRound | KeptWire] = []

    def keep(self, keeper: Any, made: int = 0) -> None:
        """Keep the state after a batch that ended with an update; a replica that is alone counts
        the updates `made`."""
        mark = None if keeper is None else self._mark(keeper)
        if mark is None:
            if isinstance(self.own, BrokenRound) and self.own.alone:
                self.own.updates += made
            return
        if self._last and isinstance(mark, BrokenRound) and _met_between(mark, self._last[-1]):
            self._around = [self._last[-1], mark]
        self._keeper, self._last, self._unfinished = keeper, [*self._last[-1:], mark], []

    def break_off(self) -> None:
        """Keep the state in the midst of a batch, whose update may have been made."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return  # the loop broke off before, and has done no batch since
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

    def find(self, meetings: int, updates: int) -> BrokenRound | KeptWire | None:
        """Return the state of this process after so many updates and at most so many meetings."""
        known = [*self._around, *self._last, *self._unfinished]
        places = [(mark.at, mark) for mark in known if mark.at is not None]
        alike = [(at[0], mark) for at, mark in places if at[1] == updates and at[0] <= meetings]
        return max(alike, key=lambda each: each[0], default=(0, None))[1]


def _met_between(mark: BrokenRound, before: BrokenRound | KeptWire) -> bool:
    return isinstance(before, BrokenRound) and mark.meetings > before.meetings


def _copied(wire: Any, before: Any = None) -> Any:
    """Return a copy of what a wire keeps; the copy `before` if it has sent nothing since."""
    if not isinstance(wire, Feedback):
        return wire
    same = isinstance(before, KeptWire) and before.steps == wire.steps
    return before if same else KeptWire(wire.steps, wire.state())


def rejoin_loop(rounds: LoopRounds | None, keeper: Any, replica: Replica) -> None:
    """Go on with a custom loop, with other replicas than before, from where the chief was.
    Collective."""
    own = None if rounds is None else rounds.own
    if replica.count == 1:
        if isinstance(own, BrokenRound):
            own.go_alone()
        return
    leads = replica.collective.rank == 0
    chief = broadcast_tree(replica.collective, own.at if leads and own is not None else None)
    if not leads:
        own = None if chief is None or rounds is None else rounds.find(*chief)
    keeper.rejoin(own, replica)
