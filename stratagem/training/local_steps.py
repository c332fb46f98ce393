"""The committer of replicas that train by themselves and meet every few updates (`sync=`).

    backward -> this replica's own gradient -> its own update -> sync: a meeting, if one is due

A fragment of the model may be sent at one update and met some updates later (`DiLoCo(overlap=)`):

    updates   1   2   3   4   5   6   7   8      every 4, 2 fragments, overlap 1
    sent          a       b       a       b      the difference old - new is sent
    met               a       b       a          the outer step, mixed with the updates since then

A gradient is scaled so that the mean of all replicas' is that of the global batch, whatever their
shares: N times this share's part of it. So with SGD and a meeting after every update the result is
that of one device. The inner optimizer's state stays with its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.codecs.feedback import Feedback
from stratagem.codecs.reducer import Plain, Reducer
from stratagem.codecs.wire_choice import reducer as reducer_for
from stratagem.errors import UsageError
from stratagem.rules.cadence import Cadence, DiLoCo, Gossip, LocalSteps, Outer, Sync
from stratagem.state.optimizer_state import optimizer_state, take_optimizer_state
from stratagem.state.outer import OuterFragment, OuterPart, fragmented, mix, take_neighbours
from stratagem.training.broken_round import (
    BrokenRound,
    OwnState,
    RoundProgress,
    RoundState,
    furthest,
    gather_progress,
    rejoin_wire,
)
from stratagem.training.custom_loop import LossReader
from stratagem.training.exchange import GradientExchange
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree, gather_tree

#: the outer optimizer that takes the mean
MEAN = Outer(lr=1.0, momentum=0.0)


class LocalUpdates(GradientExchange):
    """Keeps gradients on their replica; weights meet as `every` says."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        replica: Replica,
        reducer: Reducer,
        *,
        every: Sync,
        undoes: bool = False,
        reader: LossReader | None = None,
        **options: Any,
    ) -> None:
        assert isinstance(reducer, Plain)
        super().__init__(named, replica, reducer, reader=reader, **options)
        self.every, self.cadence = every, Cadence(every)
        #: how many meetings have ended
        self.meetings = 0
        #: returns losses and metrics that the other replicas have not received
        self.untold: Callable[[], Any] = lambda: None
        self.begun = False
        #: which parameters the last rows of this replica used
        self.used = torch.ones_like(self.buckets.used)
        #: how much of its own weights a fragment keeps when the mean comes back
        self._mix = every.mix if isinstance(every, DiLoCo) else 0.0
        #: whether an update was made for which `sync` is still to come; and the state before it
        self.uncounted = False
        self._earlier_update: OwnState | None = None
        #: with Gossip in an elastic job: the states after the last two updates, before mixing
        self._unmixed: list[OwnState] = []
        self._undoes = undoes
        trained = [(name, p) for name, p in named if p.requires_grad]
        outer = every.outer if isinstance(every, DiLoCo) else MEAN
        wire = every.wire if isinstance(every, LocalSteps | DiLoCo) else None
        parts = fragmented(trained, self.cadence.fragments)
        if len(parts) < self.cadence.fragments:
            raise UsageError(
                f"sync={every!r} has more fragments than the model has parameters "
                f"({len(trained)}); use fewer."
            )
        self.fragments = [
            OuterFragment(
                part, reducer_for(reducer.collective, wire), lr=outer.lr, momentum=outer.momentum
            )
            for part in parts
        ]
        for wire in (fragment.reducer for fragment in self.fragments):
            if isinstance(wire, Feedback):
                wire.undoes = undoes
        if reader is not None:
            reader.scale = self._scale

    def _scale(self) -> float:
        """Return the factor of this replica's mean that makes the mean over replicas right."""
        if self.cadence.together:
            return 1.0
        scale = self.replica.count * self.replica.share.weight
        return 1.0 if abs(scale - 1.0) < 1e-12 else scale

    def send(self, buckets: list[Any]) -> None:
        if self.cadence.together:
            super().send(buckets)

    def finish(self, notes: Sequence[float | Tensor]) -> Tensor:
        """Keep the gradients; return the notes as if all rows were like these."""
        share = self.replica.share
        if self.cadence.together:
            return super().finish(notes)
        self.stage(notes)
        if not self.begun or not self.cadence.apart:
            _begin_round(self)
        if self._reader is None:  # else the loss was scaled
            scale = self._scale()
            for bucket in self.buckets.buckets:
                gradients = bucket.flat[: self.buckets.length(bucket)]
                gradients.zero_() if scale == 0.0 else gradients.mul_(scale)
            self.buckets.notes.mul_(share.total / max(share.examples, 1))
        _agree_on_used(self)
        return self.finished_with()

    def _divide(self, total: Tensor) -> None:
        """Divide the gradients; a share without a counted target adds nothing."""
        if not self.cadence.together:
            for i, bucket in enumerate(self.buckets.buckets):
                gradients = bucket.flat[: self.buckets.length(bucket)]
                before = torch.zeros_like(gradients) if not self._earlier else self._earlier[i]
                gradients.copy_(torch.where(total == 0, before, gradients))
        super()._divide(total)

    @torch.no_grad()
    def sync(self) -> None:
        self.uncounted, self._earlier_update = False, None
        if self.cadence.together:
            self.cadence.updated()
            return
        if not self.begun:
            return  # an update without gradients
        turn = self.cadence.updates
        due = self.cadence.updated()
        if isinstance(self.every, Gossip):
            if self._undoes:
                self._unmixed = [*self._unmixed[-1:], _own(self._parts(), self.optimizer)]
            mix(self._parts(), self.replica.collective, self.every, turn)
        if self.cadence.ends:
            _agree(self)
        if due is not None:
            self.fragments[due].send(1.0 / self.replica.count)
        if self.cadence.ends:
            self._end(self.cadence.under_way)

    @torch.no_grad()
    def meet(self) -> None:
        """Bring the weights of all replicas together, if they have gone apart. Collective."""
        _agree(self)
        self._end(self.cadence.under_way)
        for number, fragment in enumerate(self.fragments):
            if self.cadence.unmet[number]:
                self._meet(fragment)
                self.cadence.unmet[number] = 0
        self.cadence.met()
        self._unmixed = []

    def _end(self, part: int | None) -> None:
        """End the meeting of the fragment under way, if there is one."""
        if part is not None:
            mix = self._mix if self.cadence.unmet[part] else 0.0
            self.fragments[part].end(mix)
            self.meetings += 1
            self.cadence.ended(alike=not mix)

    @property
    def apart(self) -> bool:
        return self.cadence.apart

    def _meet(self, fragment: OuterFragment, present: int = 0) -> None:
        """Take the mean over all replicas, or over the `present` ones: the others send zeros."""
        fragment.send(1.0 / (present or self.replica.count))
        fragment.end()
        self.meetings += 1

    def check_ended(self) -> None:
        """Refuse, at the end of a loop, a fragment that only some replicas have sent: the next call
        would receive it. Collective."""
        if self.cadence.delay and self.begun:
            _agree(self)

    def close(self) -> None:
        super().close()
        for part in self._parts():
            self.replica.collective.release(part.flat)

    def _parts(self) -> list[OuterPart]:
        return [part for fragment in self.fragments for part in fragment.parts]

    # --- replicas that leave and join -----------------------------------------------------------

    def remember(self) -> None:
        """Keep the state before an update that may have to be undone."""
        self._earlier_update = _own(self._parts(), self.optimizer)

    def broken_off(self, before: Any = None) -> BrokenRound:
        late = int(self.uncounted and not self.cadence.together)
        mine = _own(self._parts(), self.optimizer)
        earlier = self._earlier_update if self.uncounted else None
        if self._unmixed and self.uncounted:
            earlier = self._unmixed[-1]
        elif self._unmixed:
            mine = mine._replace(weights=self._unmixed[-1].weights)
            earlier = self._unmixed[0] if self._unmixed[1:] else None
        # what replicas share in a round stays as it is until the next meeting
        same = before is not None and not before.alone and before.meetings == self.meetings
        same = same and any(before.unmet)
        return BrokenRound(
            self.meetings,
            self.cadence.updates + int(self.uncounted),
            # a fragment under way is thrown away: its updates are in the weights, and count again
            [n + late + int(i == self.cadence.under_way) for i, n in enumerate(self.cadence.unmet)],
            old=before.old if same else _by_name(part.old() for part in self._parts()),
            mine=mine,
            momenta=before.momenta if same else _by_name(part.saved() for part in self._parts()),
            wires=[fragment.reducer for fragment in self.fragments],
            untold=self.untold(),
            earlier=earlier,
        )

    @torch.no_grad()
    def rejoin(self, mine: BrokenRound | None, replica: Replica) -> None:
        progress = gather_progress(mine, replica)
        source, chief = furthest(progress), progress[0]
        if source is None or chief is None:
            return
        ahead = progress[source]
        assert ahead is not None
        leads = replica.collective.rank == source
        shared = list(mine.shared()) if leads and mine is not None else None
        theirs = RoundState(*broadcast_tree(replica.collective, shared, source))
        gossips = isinstance(self.every, Gossip)
        if not gossips:  # updates that the chief has not made do not count
            more = max(0, ahead.updates - chief.updates)
            theirs = theirs._replace(unmet=[max(0, n - more) for n in theirs.unmet])
        if mine is not None:
            mine.go_back_to(chief.updates)
            if mine.meetings < ahead.meetings:
                mine.catch_up(theirs, [fragment.names for fragment in self.fragments], self._mix)
        self.meetings, self.cadence.updates, apart = ahead.meetings, ahead.updates, ahead.apart
        if not gossips:
            self.cadence.updates, apart = chief.updates, apart and any(theirs.unmet)
        self.cadence.met()
        for part in self._parts():
            part.restore(theirs.momenta)
            if apart or source:  # else all take the chief's weights
                part.take(theirs.old)
        befores = [None] * len(self.fragments) if mine is None else mine.wires
        for fragment, before, steps in zip(self.fragments, befores, theirs.steps, strict=True):
            gather = partial(gather_tree, replica.collective)
            rejoin_wire(fragment.reducer, before, int(steps), gather)
        same = mine is not None and (gossips or mine.updates == chief.updates) and not mine.alone
        if mine is not None and same and self.optimizer is not None:
            take_optimizer_state(self.optimizer, mine.mine.optimizer)
        if apart:
            self._hold(mine, progress, theirs.unmet)

    def _hold(
        self, mine: BrokenRound | None, progress: Sequence[RoundProgress | None], unmet: list[int]
    ) -> None:
        """Hold the meeting that broke off, with replicas that reach the chief's update; or mix."""
        _begin_round(self)
        gossip, rank, chief = self.every, self.replica.collective.rank, progress[0]
        assert chief is not None
        if isinstance(gossip, Gossip):
            here = [each is not None and each.meetings == chief.meetings for each in progress]
        else:
            place = chief.updates, self.meetings
            here = [each is not None and each.reaches(*place) for each in progress]
        if mine is not None and here[rank]:
            for part in self._parts():
                part.take(mine.mine.weights)
        if isinstance(gossip, Gossip):
            take_neighbours(self._parts(), self.replica.collective, here)
            self.cadence.unmet, self.cadence.since = unmet, max(unmet)
            self._unmixed = [_own(self._parts(), self.optimizer)]
            mix(self._parts(), self.replica.collective, gossip, self.cadence.updates - 1)
            return
        for fragment, updates in zip(self.fragments, unmet, strict=True):
            if updates:
                self._meet(fragment, sum(here))

    # --- checkpoints, made when all have met ----------------------------------------------------

    @property
    def made_with(self) -> str:
        return f"sync={self.every!r}"

    def state(self) -> dict[str, Any]:
        assert not self.apart, "a checkpoint is made at a meeting"
        momenta = _by_name(part.saved() for part in self._parts())
        return {
            "made_with": self.made_with,
            "updates": self.cadence.updates,
            "momenta": momenta if self.replica.leads else {},  # the same on all
            "wires": [fragment.reducer.state() for fragment in self.fragments],
            "optimizer": [] if self.optimizer is None else optimizer_state(self.optimizer),
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        self.cadence.updates = int(states[0]["updates"])
        self.cadence.met()
        for part in self._parts():
            part.restore(states[0]["momenta"])
        for number, fragment in enumerate(self.fragments):
            kept = [_joined(state["wires"], number) for state in states]
            known = {name for each in kept for name in each.get("kept", {}).get("residual", ())}
            if known.intersection(fragment.names):  # else it is trained from now on
                fragment.reducer.load(kept)
        if self.optimizer is not None and len(states) == self.replica.count:
            take_optimizer_state(self.optimizer, states[self.replica.index]["optimizer"])


def _own(parts: Iterable[OuterPart], optimizer: Any) -> OwnState:
    """Copy a replica's weights and its optimizer's state."""
    weights = _by_name(part.now() for part in parts)
    return OwnState(weights, [] if optimizer is None else optimizer_state(optimizer))


@torch.no_grad()
def _begin_round(committer: LocalUpdates) -> None:
    for fragment in committer.fragments:
        fragment.begin()
    committer.begun = True


def _agree_on_used(committer: LocalUpdates) -> None:
    """Mark what rows of other replicas use: momentum and weight decay move it here, too."""
    replica, used = committer.replica, committer.buckets.used
    if getattr(committer.every, "every", 0) == 1:  # the result of one device
        used.copy_(replica.collective.collect(used.to(torch.uint8)).amax(0))
    elif replica.share.examples or any(committer.fired):
        committer.used = used.clone()
    else:  # no rows here: as in the last update with rows
        trained = [p.requires_grad for p in committer.buckets.params]
        used.copy_(committer.used * torch.tensor(trained, device=used.device))


def _agree(committer: LocalUpdates) -> None:
    """Refuse a meeting to which replicas come with different counts. Collective."""
    counts = gather_tree(committer.replica.collective, committer.cadence.updates)
    if len(set(counts)) > 1:
        raise UsageError(
            f"replicas have made {counts} updates, so that some would wait for a meeting for "
            f"ever: with {committer.made_with} every replica makes every optimizer step; skip "
            "none, or leave sync out."
        )


def _by_name(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: values for part in parts for name, values in part.items()}


def _joined(fragments: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """Return a fragment's wire with what all fragments have kept: parameters may have moved."""
    kept: dict[str, dict[str, Tensor]] = {}
    for state in fragments:
        for name, by_parameter in state.get("kept", {}).items():
            kept.setdefault(name, {}).update(by_parameter)
    return {**fragments[number], "kept": kept} if kept else {}
