"""The models whose losses a loop reads, and those that it trains beside them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from stratagem.training.hints import warn_of_hooks
from stratagem.training.loss_leaves import Reach, forgotten, refuse_unprepared
from stratagem.training.replica import Replica


class Accumulates(Protocol):
    """Holds gradients, to which a backward pass may add."""

    def keep_earlier(self) -> None: ...

    def has(self, param: Tensor) -> bool: ...


class _OtherModels:
    """Backward passes that reach no prepared parameter: a replica may train a model for itself.

    If all replicas have made some before a common pass, they compare the losses.
    """

    def __init__(self) -> None:
        self._leaf: Tensor | None = None
        self._loss: Tensor | None = None
        self._passes = 0

    def note(self, leaf: Tensor | None, losses: Sequence[Tensor]) -> None:
        """Note a pass that trains a leaf, unless it reaches inputs only."""
        if leaf is not None:
            self._leaf, self._loss = leaf, losses[0].detach()

    def were_trained(self) -> bool:
        """Whether to ask, at a common pass, which replicas have trained: at the 1st, 2nd, 4th, ...
        that follows such passes."""
        if self._loss is None:
            return False
        self._passes += 1
        return self._passes & (self._passes - 1) == 0

    def forget(self) -> None:
        """Begin anew, behind a common pass."""
        self._leaf = self._loss = None

    def compare(self, gather: Callable[[Any], list[Any]]) -> None:
        """Refuse other losses on each replica, of which all have one. Collective."""
        losses = gather(float(self._loss.sum()) if self._loss is not None else None)
        known = [loss for loss in losses if loss is not None]
        if any(abs(loss - known[0]) > 1e-6 * abs(loss) for loss in known):
            refuse_unprepared(self._leaf)


class PreparedModels:
    """What belongs to prepared models in the losses of one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = weakref.ref(replica)
        #: with servers: the model that they train, and whether this is their only worker
        self.served: weakref.ref[nn.Module] | None = None
        self.is_only_worker = False
        self.beside = _OtherModels()
        self._reaches = Reach()
        #: the exchanges whose gradients losses are read for
        self._exchanges: list[weakref.ref[Accumulates]] = []
        #: the prepared models, until a warning of hooks on their parameters
        self._unhooked: list[weakref.ref[nn.Module]] = []

    def serve(self, exchange: Accumulates) -> None:
        """Have losses read for the gradients of an exchange, too, as long as it exists."""
        self._exchanges = [each for each in self._exchanges if each() is not None]
        self._exchanges.append(weakref.ref(exchange))

    def present(self) -> list[Accumulates]:
        """Return the exchanges."""
        return [each for found in self._exchanges if (each := found()) is not None]

    def _ours(self, param: Tensor) -> int:
        model = self.served() if self.served is not None else None
        own = 0 if model is None else sum(each is param for each in model.parameters())
        return own or self._hooks_on(param)

    def _hooks_on(self, param: Tensor) -> int:
        return sum(each.has(param) for each in self.present())

    def leave_out(self, losses: Sequence[Tensor], rows: int | None) -> bool:
        """Whether losses are of another model, which with servers the chief alone may train."""
        if self.is_only_worker or self._reaches(losses, self._ours):
            return False
        leaf, replica = forgotten(losses, self._ours, rows), self._replica()
        if self.served is not None and replica is not None and not replica.is_chief:
            refuse_unprepared(leaf)
        self.beside.note(leaf, losses)
        return True

    def refuse_forgotten(self, losses: Sequence[Tensor], rows: int | None) -> None:
        """Refuse losses that train something beside the prepared models."""
        if not self.is_only_worker:
            refuse_unprepared(forgotten(losses, self._ours, rows))

    def watch_hooks(self, model: nn.Module) -> None:
        """Warn, at a later pass, if the user has hooks on the model's parameters."""
        self._unhooked.append(weakref.ref(model))

    def look_for_hooks(self) -> None:
        """Give that warning."""
        models = [model for found in self._unhooked if (model := found()) is not None]
        replica, pushed = self._replica(), self.served is not None  # by a hook
        ours = lambda p: self._hooks_on(p) + pushed  # noqa: E731
        if replica is not None and any(warn_of_hooks(each, replica, ours) for each in models):
            self._unhooked = []
