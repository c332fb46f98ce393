"""Sends what callbacks change on the chief during a call to the other replicas.

followed       weights and buffers (also through `.data`), requires_grad, the optimizer's parameter
               groups, and plain attributes of the module and of its submodules
refused        other layers or parameters, and the optimizer's state
not followed   anything else: globals, closures, other objects, the loss, metrics, the data
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import (
    AttributeTracker,
    Change,
    TensorTracker,
    adopt,
    layout,
    module_attributes,
    parts_of,
    requires_grad,
    state_of,
)
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree

#: applies what callbacks changed on the chief
Listen = Callable[[], Any]


class CallbackChanges:
    """Tracks what callbacks change between two points at which all replicas are equal.

    Args:
        model: the model; None if there are no callbacks.
        own: whether a callback runs user code.
    """

    def __init__(self, model: Any, *, own: bool) -> None:
        self._model, self._own = model, own
        #: alone: there is no other replica; in_common: all replicas share the chief's parameters
        self.alone = self.in_common = False
        #: how often plain attributes have changed, after which a model must be traced again
        self.followed = 0
        self._params, self._buffers = TensorTracker(), TensorTracker()
        self._attributes: AttributeTracker | None = None
        self._trained: list[bool] = []
        self._layout: tuple[Any, ...] = ()
        self._state: dict[Any, Any] = {}

    def mark(self) -> None:
        """Record the model's present state as equal on every replica."""
        if self._model is None or self.alone:
            return
        module = self._model.module
        self._params.mark(list(module.parameters()), closely=self._own and not self.in_common)
        self._buffers.mark(list(module.buffers()), closely=self._own)
        if self._own:
            self._attributes = module_attributes(module)
            self._trained = requires_grad(module)
            self._layout, self._state = self._current_layout(), self._current_state()

    @property
    def _quiet(self) -> bool:
        """Whether there is no user callback, or no replica to follow it."""
        return self._model is None or self.alone or self._attributes is None

    def written(self) -> list[Tensor]:
        """Return the parameters and buffers that callbacks wrote to."""
        if self._model is None or self.alone:
            return []
        module = self._model.module
        pairs = ((self._params, module.parameters()), (self._buffers, module.buffers()))
        found = []
        for tracker, tensors in pairs:
            each = list(tensors)
            found += [each[i] for i in tracker.changes(each)]
        return found

    def attributes(self) -> list[Change]:
        """Return the plain attributes that callbacks changed."""
        return [] if self._quiet or self._attributes is None else self._attributes.changes()

    def requires_grad(self) -> list[bool] | None:
        """Return `requires_grad` of every parameter if callbacks changed it, else None."""
        now = None if self._quiet else requires_grad(self._model.module)
        return now if now != self._trained else None

    def unfollowable(self) -> str | None:
        """Return the name of a change that workers of servers cannot follow, or None."""
        if changed := self.attributes():
            assert self._attributes is not None
            index, name, _ = changed[0]
            changed_part = self._attributes.objects[index]
            parts = self._model.module.named_modules(prefix="model")
            return next(f"{path}.{name}" for path, part in parts if part is changed_part)
        return "requires_grad" if self.requires_grad() is not None else None

    def check_layout(self) -> None:
        """Raise if a callback replaced layers, or parameters of the optimizer."""
        if not self._quiet and self._layout != self._current_layout():
            raise NotDistributable(
                "a callback replaced layers or parameters of the model, or changed which of them "
                "the optimizer has (add_param_group?), and the other replicas have models of their "
                "own; do it between two fits, or switch requires_grad at the beginning of an epoch."
            )

    def check_state(self) -> None:
        """Raise if a callback changed the optimizer's state, which is local to each replica."""
        if not self._quiet and self._state != self._current_state():
            raise NotDistributable(
                "a callback changed the optimizer's state (model.load does that, too), which the "
                "other replicas do not follow; do it before fit, or change the weights alone: "
                "model.module.load_state_dict(...)."
            )

    def _trained_params(self) -> list[Tensor]:
        groups = () if self._model.optimizer is None else self._model.optimizer.param_groups
        return [param for group in groups for param in group["params"]]

    def _current_layout(self) -> tuple[Any, ...]:
        parts = layout(self._model.module, buffers=self.in_common)
        return parts, list(map(id, self._trained_params()))

    def _current_state(self) -> dict[Any, Any]:
        """Return the objects of the optimizer's state; shared tensors may be written to."""
        optimizer, params = self._model.optimizer, self._trained_params()
        return state_of(optimizer, params, versions=not self.in_common) if params else {}


def share_attributes(module: nn.Module, replica: Replica) -> None:
    """Broadcast the chief's plain attributes, for a replica that has just joined. Collective."""
    mine = None
    if replica.is_chief:
        known = module_attributes(module).everything()
        mine = [requires_grad(module), [list(each) for each in known]]
    trained, attributes = broadcast_tree(replica.collective, mine)
    if not replica.is_chief:
        _follow(module, trained, attributes)


def _follow(module: nn.Module, trained: list[bool], attributes: list[Any]) -> None:
    for param, wanted in zip(module.parameters(), trained, strict=False):
        param.requires_grad_(wanted)
    adopt(parts_of(module), attributes)


class CallTarget(Protocol):
    """The parts of a call that callbacks may change."""

    module: nn.Module
    callbacks: Any


def news(job: CallTarget, *, written: bool) -> dict[str, Any]:
    """On the chief: return the message with everything that callbacks changed."""
    changes: CallbackChanges = job.callbacks.changes
    state = [*job.module.parameters(), *job.module.buffers()]
    return {
        "weights": [t.detach() for t in state] if written else None,
        "requires_grad": changes.requires_grad(),
        "attributes": [list(each) for each in changes.attributes()],
    }


@torch.no_grad()
def heed(job: CallTarget, replica: Replica, told: dict[str, Any]) -> None:
    """Apply the changes of the chief's callbacks."""
    weights, trained, attributes = told["weights"], told["requires_grad"], told["attributes"]
    if not replica.is_chief:
        if weights is not None and replica.collective.live:  # a standby may share the parameters
            state = [*job.module.parameters(), *job.module.buffers()]
            for tensor, value in zip(state, weights, strict=True):
                tensor.copy_(value)
        _follow(job.module, trained or [], attributes)
    job.callbacks.changes.followed += bool(attributes)
    if weights is not None or trained is not None or attributes:
        job.callbacks.changes.mark()
