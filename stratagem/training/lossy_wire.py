"""Lossy wires and `sync=`: their checks and warnings, and the state that outlasts a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stratagem.capabilities import sentence
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

#: what this process has said: a sentence, and the wire or cadence
_said: set[tuple[str, Any]] = set()


def _warn_once(sentence: str, about: Any) -> None:
    if (sentence, about) not in _said:
        _said.add((sentence, about))
        log.warning(sentence, about)


def check_optimizer(settings: Settings, optimizer: Any, replica: Replica) -> None:
    """Refuse an optimizer that fails with a lossy wire, and warn that results are not exact."""
    wire = settings.wire
    if replica.count > 1 and type(optimizer).__name__ in _SCALERS:
        refuse_scaler(settings, type(optimizer).__name__)
    _warn_of_sync(settings, replica)
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
    if replica.leads:
        _warn_once(
            "wire=%r: replicas send less than their gradients, and what is left out later; weights "
            "are alike on all replicas, but no longer those of one device",
            wire,
        )


def check_pushes(wire: Compression, optimizer: Any, dtype: torch.dtype) -> None:
    """Check the same as the chief of workers that push."""
    _refuse_optimizer(wire, optimizer)
    if dtype.itemsize < 4:
        raise NotDistributable(
            f"wire={wire!r} keeps small parts of gradients, which numbers of type {dtype} would "
            'lose; train in float32 with precision="bfloat16", or use wire="bfloat16".'
        )
    _warn_once(
        "wire=%r: workers push less than their gradients, and what is left out later; the result "
        "is no longer that of whole gradients",
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


def _warn_of_sync(settings: Settings, replica: Replica) -> None:
    if settings.sync is None or not replica.leads:
        return
    if replica.count == 1:
        warning = "sync=%r: one replica meets nobody, and trains as it would without"
    else:
        warning = (
            "sync=%r: replicas train by themselves between meetings, each with its own gradients, "
            "clipping and optimizer state; the result is no longer that of one device"
        )
    _warn_once(warning, settings.sync)


#: what scales gradients by a number that changes, and what to use in its place
_SCALERS = {
    'precision="float16"': 'use precision="bfloat16"',
    "GradScaler": "leave the scaler out and use bfloat16",
    "LossScaleOptimizer": "use the policy mixed_bfloat16",
}


def forbids_scaler(settings: Settings) -> bool:
    """Whether gradients must keep their scale from step to step."""
    return settings.sync is not None or isinstance(settings.wire, Compression)


def refuse_scaler(settings: Settings, scaler: str) -> None:
    """Refuse a scaler of gradients: parts of them that are kept, and replicas that find scales of
    their own, would be of another scale than the rest."""
    if not forbids_scaler(settings):
        return
    placement = "compressed" if settings.sync is None else "averaged"
    words = {"sync": settings.sync, "wire": repr(settings.wire), "instead": _SCALERS[scaler]}
    raise NotDistributable(sentence(placement, "a scaler of gradients", scaler=scaler, **words))


def _momenta(optimizer: Any) -> list[float]:
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        return [float(group.get("momentum", 0.0)) for group in groups]
    return [float(getattr(optimizer, "momentum", 0.0) or 0.0)]


def _is_linear(optimizer: Any) -> bool:
    """Whether an optimizer's step is a sum of gradients: SGD of torch, or of Keras."""
    return any(base.__name__ == "SGD" for base in type(optimizer).__mro__)


class Keeper:
    """Base of committers: the state that they keep from one step to the next, here the wire's."""

    reducer: Reducer
    #: the optimizer, if the committer needs it
    optimizer: Any = None

    def meet(self) -> None:
        """Bring replicas together before their weights are read; those that all-reduce always are.
        Collective."""

    def check_ended(self) -> None:
        """Refuse, at the end of a loop, messages that are under way on some replicas only."""

    @property
    def apart(self) -> bool:
        """Whether replicas have made updates of their own; the same on all."""
        return False

    @property
    def made_with(self) -> str:
        """The setting that a checkpoint must match for this state to be loaded."""
        return f"wire={getattr(self.reducer, 'record', None)!r}"

    def state(self) -> dict[str, Any]:
        """Copy this replica's state."""
        return self.reducer.state()

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of all replicas."""
        self.reducer.load(states)

    def broken_off(self, before: Any = None) -> Any:
        """Return the state to `rejoin` with, when replicas leave or join; None if there is none.
        Parts that are as in `before`, an earlier result, need not be copied again."""
        return self.reducer if isinstance(self.reducer, Feedback) else None

    def rejoin(self, mine: Any, replica: Replica) -> None:
        """Go on with other replicas than before, from what `broken_off` returned here; None where
        this process is new, or had no state. The chief's position counts. Collective."""
        if isinstance(self.reducer, Feedback):
            steps = broadcast_tree(replica.collective, mine.steps if mine is not None else 0)
            rejoin_wire(self.reducer, mine, int(steps), partial(gather_tree, replica.collective))


#: at most one: what `Keeper.broken_off` returned when a `fit` broke off in this process
_broken_off: list[Any] = []


def break_off(keeper: Keeper | None) -> None:
    """Keep a committer's state when replicas leave or join, until `rejoin`. A replica that is left
    alone sends nothing, and keeps it until others join."""
    found = None if keeper is None else keeper.broken_off()
    if found is not None and not _broken_off:  # else it broke off again before `rejoin`
        _broken_off.append(found)


def begin_anew() -> None:
    """Drop what was kept, since a new training begins."""
    _broken_off.clear()


def broken_round() -> BrokenRound | None:
    """Return what this process had when a round of `sync=` broke off."""
    return next((each for each in _broken_off if isinstance(each, BrokenRound)), None)


def updated_alone() -> None:
    """Count an update that a replica has made alone."""
    if (mine := broken_round()) is not None and mine.alone:
        mine.updates += 1


def rejoin(keeper: Keeper | None, replica: Replica) -> None:
    """Go on with other replicas than before, from the state that `break_off` kept. Collective.

    A new replica has none, and what dead replicas had kept is lost.
    """
    if keeper is not None and replica.count > 1:
        keeper.rejoin(_broken_off[0] if _broken_off else None, replica)
        _broken_off.clear()
    elif (mine := broken_round()) is not None:
        mine.go_alone()


def handed_on(keeper: Keeper) -> dict[str, Any]:
    """Return the state for a committer of other parameters of the same model; what was kept for
    parameters that are frozen now is given up."""
    found = keeper.state()
    return {**found, "refrozen": True} if found else {}


def load_kept(keeper: Keeper | None, states: Sequence[Mapping[str, Any]]) -> None:
    """Load the committers' states of a checkpoint; warn if this committer cannot."""
    kept = [state for state in states if state]
    if not kept:
        return
    made = str(kept[0].get("made_with", f"wire={kept[0].get('wire')}"))
    if keeper is not None and keeper.made_with == made:
        keeper.load(kept)
        return
    warn_of_dropped(made)


def warn_of_dropped(made: str) -> None:
    """Warn that a committer's state in a checkpoint is dropped."""
    log.warning(
        "the checkpoint was made with %s, which had kept something for later steps (parts of "
        "gradients, an outer momentum); this training has another setting, or one replica, and "
        "goes on without that.",
        made,
    )
