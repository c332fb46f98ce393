"""A custom loop that is begun again in the same process, because replicas have left or joined.

`strategy.run(train)` calls the function once more, on those who are here now, and `loader.epochs`
puts everything to what it was after the last update. The chief keeps a copy of that in memory: a
function can break off between the optimizer's step and the scheduler's, and half of a step counts
for nothing.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.streams import generator_states, set_beside_torch
from stratagem.errors import UsageError
from stratagem.training.broken_round import LoopRounds
from stratagem.training.elastic import Again
from stratagem.training.replica import Replica
from stratagem.training.termination import Termination

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


class LoopJournal:
    """How far this process has come in one call of `strategy.run`."""

    def __init__(self, *, inherited: bool = False) -> None:
        self.again = Again(lambda: self.steps, whole=True, hurry=lambda: self.termination.asked)
        self.again.inherited = inherited
        #: how often the function was begun again
        self.restarts = -1
        #: batches that are in the weights; None before something is prepared
        self.steps: int | None = None
        #: of the loop's checkpoints: the last one's step and time
        self.last_saved: tuple[int, float] | None = None
        #: SIGTERM counts in whichever try it comes, and between them
        self.termination = Termination()
        #: with a lossy wire, or `sync=`: what this replica alone has
        self.rounds = LoopRounds()
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
        self._prepared = False
        _journals[replica] = self

    def open(self) -> None:
        """Note that a model is prepared: from here on the loop can be begun again."""
        if self._prepared:
            raise UsageError(
                "with elastic=True a function prepares one model, whose loader counts the batches; "
                "put several into one nn.ModuleList with one optimizer, or leave elastic out."
            )
        self._prepared = True
        self.steps = self.steps or 0
        self.again.let_join()

    def keep(self, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
        """On the chief: keep where the loop goes on if it breaks off."""
        state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
        self._kept = _copied({**state, **progress}, self._kept)
        self.steps = int(progress["step"])

    def put_back(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Put both to what was kept; returns the rest of it, None if nothing was."""
        if self._kept is None:
            return None
        kept = _copied(self._kept)
        model.load_state_dict(kept.pop("model"))
        optimizer.load_state_dict(kept.pop("optimizer"))
        return {**kept, "restarts": self.restarts}

    def close(self) -> None:
        """End the call."""
        self.termination.close()


_journals: weakref.WeakKeyDictionary[Replica, LoopJournal] = weakref.WeakKeyDictionary()


def journal_of(replica: Replica) -> LoopJournal | None:
    """Return the journal of this replica's call; None on followers, and without elastic."""
    return _journals.get(replica)


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
