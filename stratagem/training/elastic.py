"""Elastic jobs, which replicas may leave and join: when a call is begun again, and from where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.cluster.failure import DEPARTURES, Failure
from stratagem.data.streams import generator_states, set_beside_torch
from stratagem.errors import ReplicaLost, ReplicaStalled, UsageError
from stratagem.training.broken_round import LoopRounds
from stratagem.training.replica import Replica
from stratagem.training.termination import Termination

PREPARED = sentence("elastic", "a model prepared again")
#: how often replicas may die with nothing done in between
IN_VAIN = 3


def _reraise(error: BaseException) -> None:
    raise error


@dataclass
class Again:
    """A call that can be begun again after replicas have left or joined an elastic job."""

    #: how much of the call is done and in its arguments; None while it cannot be begun again
    done: Callable[[], int | None]
    #: whether the caller needs the results of all replicas, not only of this process
    whole: bool = False
    #: whether the call is about to end, so that the remaining replicas suffice, however few
    hurry: Callable[[], bool] = lambda: False
    #: whether another process can become the chief of the call, where the job outlives the chief
    inherited: bool = False
    #: whether standbys can follow the call, and replace a follower within its steps
    followed: bool = False
    #: lets tasks join, once the call can be begun again; set by the replica group
    let_join: Callable[[], None] = lambda: None
    #: forms the group again in mid-call, which goes on in this process while the other replicas
    #: begin anew; raises if the job ends
    regroup: Callable[[BaseException], None] = _reraise
    #: after the loss of a server: restores the arguments from the last checkpoint; raises if the
    #: job ends
    go_back: Callable[[BaseException], None] = _reraise


class Tries:
    """Counts the failures of one call, and decides whether it is begun again."""

    def __init__(self, again: Again | None) -> None:
        self._again = again
        #: whether the call may be begun again at all
        self.elastic = self._again is not None
        self._done = -1
        self._in_vain = 0
        #: whether `left` has returned False
        self._over = False

    def left(
        self, error: BaseException, trouble: Failure | None, *, chief_may_die: bool = False
    ) -> bool:
        """Whether the call is begun again: not after an exception, which would be raised again, nor
        after replicas have died several times with nothing done in between.

        `chief_may_die`: the job outlives its chief, if the call can be inherited.
        """
        chief = trouble is not None and trouble.rank == 0 and trouble.kind in DEPARTURES
        stays = chief and chief_may_die and not (self._again and self._again.inherited)
        self._over = self._over or stays or not self._left(error, trouble)
        return not self._over

    def _left(self, error: BaseException, trouble: Failure | None) -> bool:
        if self._again is None or trouble is None:
            return False
        if not isinstance(error, ReplicaLost | ReplicaStalled):
            return False
        done = self._again.done()
        if done is None or trouble.kind not in ("joined", *DEPARTURES):
            return False
        if trouble.kind == "joined":
            return True
        self._in_vain = 0 if done > self._done else self._in_vain + 1
        self._done = done
        return self._in_vain < IN_VAIN


# --- a custom loop that is begun again in the same process ----------------------------------------
#
# `strategy.run(train)` calls the function once more, on the present replicas, and `loader.epochs`
# restores the state after the last update. The chief keeps a copy of that in memory: a function can
# break off between the optimizer's step and the scheduler's, and half of a step must not count.


_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


class LoopJournal:
    """The progress of this process in one call of `strategy.run`."""

    def __init__(self, *, inherited: bool = False) -> None:
        self.again = Again(lambda: self.steps, whole=True, hurry=lambda: self.termination.asked)
        self.again.inherited = inherited
        #: how often the function was begun again
        self.restarts = -1
        #: batches that are in the weights; None before a model is prepared
        self.steps: int | None = None
        #: of the loop's checkpoints: the last one's step and time
        self.last_saved: tuple[int, float] | None = None
        #: SIGTERM counts in any try of the call, and between two of them
        self.termination = Termination()
        #: with a lossy wire, or `sync=`: state that only this replica has
        self.rounds = LoopRounds()
        self._prepared: nn.Module | None = None
        self._random: dict[str, Any] | None = None
        self._kept: dict[str, Any] | None = None

    def begin(self, replica: Replica) -> None:
        """Begin a call of the function, with the random numbers of its first call."""
        self.restarts += 1
        if self._random is None:
            self._random = generator_states(replica.device)
        else:
            torch.set_rng_state(self._random["torch"])
            set_beside_torch(self._random, replica.device)
        self._prepared = None
        replica.loop.journal = self

    def open(self, model: nn.Module) -> None:
        """Note that a model is prepared: from here on the loop can be begun again."""
        if self._prepared is model:
            raise UsageError(PREPARED)
        if self._prepared is not None:
            raise UsageError(sentence("elastic", "several models in a loop"))
        self._prepared = model
        self.steps = self.steps or 0
        self.again.let_join()

    def keep(self, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
        """On the chief: keep the state from which the loop goes on if it breaks off."""
        state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
        self._kept = _copied({**state, **progress}, self._kept)
        self.steps = int(progress["step"])

    def put_back(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Restore model and optimizer; return the rest of what was kept, None if nothing was."""
        if self._kept is None:
            return None
        kept = _copied(self._kept)
        model.load_state_dict(kept.pop("model"))
        optimizer.load_state_dict(kept.pop("optimizer"))
        return {**kept, "restarts": self.restarts}

    def close(self) -> None:
        """End the call."""
        self.termination.close()


def journal_of(replica: Replica) -> LoopJournal | None:
    """Return the journal of this replica's call; None on followers, and without elastic."""
    return replica.loop.journal  # type: ignore[no-any-return]


def _copied(tree: Any, into: Any = None) -> Any:
    """Return a copy, in the memory of an earlier one where that fits."""
    if isinstance(tree, _NUMBERS):
        return tree
    if isinstance(tree, Tensor):
        return _tensor(tree.detach(), into)
    if type(tree) in (list, tuple):
        parts = into if type(into) is type(tree) and len(into) == len(tree) else [None] * len(tree)
        return type(tree)(_copied(each, part) for each, part in zip(tree, parts, strict=True))
    if type(tree) is dict:
        before = into if isinstance(into, Mapping) else {}
        return {key: _copied(value, before.get(key)) for key, value in tree.items()}
    return copy.deepcopy(tree)


def _tensor(tensor: Tensor, into: Any) -> Tensor:
    fits = (
        isinstance(into, Tensor)
        and into.shape == tensor.shape
        and into.dtype == tensor.dtype
        and into.device == tensor.device
    )
    return into.copy_(tensor) if fits else tensor.clone()
