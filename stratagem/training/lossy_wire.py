"""Lossy compressions: which optimizers and scalers they go with, and what is said of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stratagem.codecs.compression import Compression
from stratagem.codecs.feedback import Feedback
from stratagem.codecs.reducer import Reducer
from stratagem.codecs.topk import TopK
from stratagem.errors import NotDistributable
from stratagem.training.broken_round import BrokenRound, rejoin_wire
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings
from stratagem.wire.tree import broadcast_tree, gather_tree

log = logging.getLogger("stratagem")

#: wires and cadences of which this process has spoken
_said: set[Any] = set()


def check_optimizer(settings: Settings, optimizer: Any, replica: Replica) -> None:
    """Refuse an optimizer that a lossy wire leads astray, and say what is no longer exact."""
    wire = settings.wire
    _tell_of_sync(settings, replica)
    if not isinstance(wire, Compression):
        return
    momentum = wire.momentum if isinstance(wire, TopK) else 0.0
    if momentum and replica.count == 1:
        raise NotDistributable(
            f"wire={wire!r} keeps the momentum of several replicas, and there is one, which sends "
            "nothing; leave wire out, and give the momentum to the optimizer."
        )
    if replica.count == 1:
        return
    _refuse_optimizer(wire, optimizer)
    if replica.leads and wire not in _said:
        _said.add(wire)
        log.warning(
            "wire=%r: replicas send less than their gradients, and what is left out later; weights "
            "are alike on all replicas, but no longer those of one device",
            wire,
        )


def check_pushes(wire: Compression, optimizer: Any, dtype: torch.dtype) -> None:
    """As the chief of workers that push: the same."""
    _refuse_optimizer(wire, optimizer)
    if dtype.itemsize < 4:
        raise NotDistributable(
            f"wire={wire!r} keeps small parts of gradients, which numbers of type {dtype} would "
            'lose; train in float32 with precision="bfloat16", or use wire="bfloat16".'
        )
    if wire not in _said:
        _said.add(wire)
        log.warning(
            "wire=%r: workers push less than their gradients, and what is left out later; the "
            "result is no longer that of whole gradients",
            wire,
        )


def _refuse_optimizer(wire: Compression, optimizer: Any) -> None:
    momentum = wire.momentum if isinstance(wire, TopK) else 0.0
    if momentum and any(_momenta(optimizer)):
        raise NotDistributable(
            f"wire={wire!r} keeps the momentum, and the optimizer has one of its own, so that "
            "gradients would be added up twice; use SGD without momentum."
        )
    if wire.only_linear and not _is_linear(optimizer):
        raise NotDistributable(
            f"{type(optimizer).__name__} divides by the size of the gradients that it is given, "
            f"and wire={wire!r} gives it few or coarse ones; use SGD, or sg.Int8()."
        )


def _tell_of_sync(settings: Settings, replica: Replica) -> None:
    sync = settings.sync
    if sync is None or not replica.leads or (sync, replica.count) in _said:
        return
    _said.add((sync, replica.count))
    if replica.count == 1:
        log.warning("sync=%r: one replica meets nobody, and trains as it would without", sync)
        return
    log.warning(
        "sync=%r: replicas train by themselves between meetings, each with its own gradients, "
        "clipping and optimizer state; the result is no longer that of one device",
        sync,
    )


def refuse_half(settings: Settings) -> None:
    """Refuse gradients that a scaler multiplies by another number now and then."""
    if settings.sync is not None:
        raise NotDistributable(
            f'precision="float16" finds a scale for the gradients of all, and with sync='
            f'{settings.sync!r} each replica has its own; use precision="bfloat16".'
        )
    if isinstance(settings.wire, Compression):
        raise NotDistributable(
            f'precision="float16" scales gradients by a number that changes, and wire='
            f"{settings.wire!r} keeps some of them for later steps; use precision="
            '"bfloat16".'
        )


def _momenta(optimizer: Any) -> list[float]:
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        return [float(group.get("momentum", 0.0)) for group in groups]
    return [float(getattr(optimizer, "momentum", 0.0) or 0.0)]


def _is_linear(optimizer: Any) -> bool:
    """Whether its step is a sum of gradients: SGD of torch, or of Keras."""
    return any(base.__name__ == "SGD" for base in type(optimizer).__mro__)


class Keeper:
    """What keeps something from one step to the next, as committers do: here, the wire."""

    reducer: Reducer
    #: what updates the parameters, where that is to be known
    optimizer: Any = None

    def meet(self) -> None:
        """Bring replicas together before somebody looks at the weights; those that add up their
        gradients always are. Collective."""

    def check_ended(self) -> None:
        """A loop is over: refuse one after which something of it is still under way for some."""

    @property
    def apart(self) -> bool:
        """Whether replicas have updates of their own; the same on all."""
        return False

    @property
    def made_with(self) -> str:
        """What its state in a checkpoint is known by."""
        return f"wire={getattr(self.reducer, 'record', None)!r}"

    def state(self) -> dict[str, Any]:
        """Copy what this replica keeps."""
        return self.reducer.state()

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of all replicas."""
        self.reducer.load(states)

    def broken_off(self, before: Any = None) -> Any:
        """What is kept here when replicas leave or join, for `rejoin`; None: nothing. What has not
        changed since `before`, which it returned earlier, need not be copied again."""
        return self.reducer if isinstance(self.reducer, Feedback) else None

    def rejoin(self, mine: Any, replica: Replica) -> None:
        """Go on among others than before from what `broken_off` returned here; None where this
        process is new, or had nothing. What counts is the chief's. Collective."""
        if isinstance(self.reducer, Feedback):
            steps = broadcast_tree(replica.collective, mine.steps if mine is not None else 0)
            rejoin_wire(self.reducer, mine, int(steps), partial(gather_tree, replica.collective))


#: of a training that has broken off in this process: what its committer had kept
_broken_off: list[Any] = []


def break_off(keeper: Keeper | None) -> None:
    """Replicas have left or joined: go on later with what is kept here. One that is left alone
    sends nothing, and keeps it until there are others."""
    found = None if keeper is None else keeper.broken_off()
    if found is not None and not _broken_off:  # else it broke off before all were here
        _broken_off.append(found)


def begin_anew() -> None:
    """A training begins that goes on from nothing."""
    _broken_off.clear()


def broken_round() -> BrokenRound | None:
    """What this process had when a round of `sync=` broke off."""
    return next((each for each in _broken_off if isinstance(each, BrokenRound)), None)


def updated_alone() -> None:
    """An update was made; count it, if it is that of one who was left alone by others."""
    if (mine := broken_round()) is not None and mine.alone:
        mine.updates += 1


def rejoin(keeper: Keeper | None, replica: Replica) -> None:
    """Go on among others than before with what was kept when the chief was where it is. Collective.

    Who is new here has kept nothing, and what the dead had kept is lost with them.
    """
    if keeper is not None and replica.count > 1:
        keeper.rejoin(_broken_off[0] if _broken_off else None, replica)
        _broken_off.clear()
    elif (mine := broken_round()) is not None:
        mine.go_alone()


def handed_on(keeper: Keeper) -> dict[str, Any]:
    """What goes on in this process where others are trained; what was kept of parameters that are
    frozen now is given up."""
    found = keeper.state()
    return {**found, "refrozen": True} if found else {}


def load_kept(keeper: Keeper | None, states: Sequence[Mapping[str, Any]]) -> None:
    """Go on with what the replicas' committers had kept when they were saved; say if nobody can."""
    kept = [state for state in states if state]
    if not kept:
        return
    made = str(kept[0].get("made_with", f"wire={kept[0].get('wire')}"))
    if keeper is not None and keeper.made_with == made:
        keeper.load(kept)
        return
    tell_of_dropped(made)


def tell_of_dropped(made: str) -> None:
    """Say that nobody goes on with what was kept."""
    log.warning(
        "the checkpoint was made with %s, which had kept something for later steps (parts of "
        "gradients, an outer momentum); this training has another setting, or one replica, and "
        "goes on without that.",
        made,
    )
