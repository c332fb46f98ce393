"""What callbacks change on the chief while a call is under way, and how other replicas follow.

followed       weights and buffers (also through `.data`), requires_grad, the optimizer's parameter
               groups, and plain attributes of the module and of its submodules
refused        other layers or parameters, and the optimizer's state
not followed   anything else: globals, closures, other objects, the loss, metrics, the data
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.errors import NotDistributable
from stratagem.state.write_tracker import WriteTracker
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree

#: the number of an object, the name of its attribute, and the new value
Change = tuple[int, str, Any]
#: follows what callbacks changed on the chief
Listen = Callable[[], Any]

_PLAIN = frozenset({bool, int, float, str, type(None)})
_MOST = 256  # entries of a list or dict; what is longer is data
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_NOT = object()


class AttributeTracker:
    """Plain attributes of some objects: numbers, words, switches, None and tensors; with `nested`
    also short lists, tuples and dicts (with words for keys) of them."""

    def __init__(
        self, objects: Sequence[Any], but: Collection[str] = (), *, nested: bool = False
    ) -> None:
        self.objects, self._but, self._nested = objects, but, nested
        self.mark()

    def mark(self) -> None:
        """Take the attributes as they are now for known."""
        self._seen = self._look()

    def changes(self) -> list[Change]:
        """The attributes that are new or other ones since the mark."""
        now = self._look()
        if now == self._seen:
            return []
        return [
            (i, name, _portable(vars(self.objects[i])[name]))
            for i, (old, new) in enumerate(zip(self._seen, now, strict=True))
            for name, seen in new.items()
            if name not in old or old[name] != seen
        ]

    def everything(self) -> list[Change]:
        """All of them, for a copy that was made earlier."""
        return [
            (i, name, _portable(vars(self.objects[i])[name]))
            for i, each in enumerate(self._seen)
            for name in each
        ]

    def values(self) -> list[tuple[Any, dict[str, Any]]]:
        """The objects, each with the values of its plain attributes at the mark."""
        pairs = zip(self.objects, self._seen, strict=True)
        return [(obj, {name: vars(obj)[name] for name in seen}) for obj, seen in pairs]

    def _look(self) -> list[dict[str, Any]]:
        found = []
        for obj in self.objects:
            seen = {n: self._snapshot(v) for n, v in vars(obj).items() if n not in self._but}
            found.append({name: value for name, value in seen.items() if value is not _NOT})
        return found

    def _snapshot(self, value: Any) -> Any:
        """What tells later whether this is still the same value; `_NOT` of what is not plain."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, np.generic):
            return value.item()
        if kind is Tensor:
            if value.grad_fn is not None or value.layout is not torch.strided:
                return _NOT
            return kind, id(value), value._version, value.data_ptr()
        if not self._nested or kind not in (list, tuple, dict) or len(value) > _MOST:
            return _NOT
        if kind is dict and not all(type(key) is str for key in value):
            return _NOT
        inside = tuple(map(self._snapshot, value.values() if kind is dict else value))
        return _NOT if _NOT in inside else (kind, tuple(value) if kind is dict else (), inside)


def _portable(value: Any) -> Any:
    """A plain value for other processes."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    return type(value)(map(_portable, value)) if isinstance(value, list | tuple) else value


def adopt(objects: Sequence[Any], changes: Sequence[Change]) -> None:
    """Make the same changes to a copy; a tensor goes where the one before it was."""
    for index, name, value in changes:
        attributes = vars(objects[index])
        before = attributes.get(name)
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            value = value.to(before.device)
        attributes[name] = value


def _modules(module: nn.Module) -> list[nn.Module]:
    """All of them but compiled ones, whose attributes are not to be seen."""
    return [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]


def module_attributes(module: nn.Module) -> AttributeTracker:
    """Plain attributes of a module and its parts, but torch's own."""
    return AttributeTracker(_modules(module), _TORCHS, nested=True)


class ChangeTracker:
    """What callbacks change between two moments at which all replicas have the same.

    Args:
        model: None where nobody changes anything.
        own: whether there is code among the callbacks that is not ours.
    """

    def __init__(self, model: Any, *, own: bool) -> None:
        self._model, self._own = model, own
        #: whether nobody has to follow; whether all replicas read the chief's very parameters
        self.alone = self.in_common = False
        #: how often plain attributes have changed: what was traced is to be traced again
        self.followed = 0
        self._params, self._buffers = WriteTracker(), WriteTracker()
        self._attributes: AttributeTracker | None = None
        self._frozen: list[bool] = []
        self._layout: list[int] = []
        self._state: list[Any] = []

    def settle(self) -> None:
        """Whatever the model is now is known to every replica."""
        if self._model is None or self.alone:
            return
        module = self._model.module
        self._params.mark(list(module.parameters()), closely=self._own and not self.in_common)
        self._buffers.mark(list(module.buffers()), closely=self._own)
        if self._own:
            self._attributes = module_attributes(module)
            self._frozen = _requires_grad(module)
            self._layout, self._state = self._current_layout(), self._current_state()

    @property
    def _quiet(self) -> bool:
        """Whether there is nobody who could have changed what we do not change ourselves."""
        return self._model is None or self.alone or self._attributes is None

    def written(self) -> list[Tensor]:
        """The parameters and buffers that callbacks wrote into."""
        if self._model is None or self.alone:
            return []
        module = self._model.module
        pairs = ((self._params, module.parameters()), (self._buffers, module.buffers()))
        found = []
        for tracker, tensors in pairs:
            each = list(tensors)
            found += [each[i] for i in (*tracker.written(each), *tracker.slipped())]
        return found

    def attributes(self) -> list[Change]:
        """The plain attributes that callbacks changed."""
        return [] if self._quiet or self._attributes is None else self._attributes.changes()

    def requires_grad(self) -> list[bool] | None:
        """Which parameters require a gradient, if callbacks changed that."""
        now = None if self._quiet else _requires_grad(self._model.module)
        return now if now != self._frozen else None

    def unfollowable(self) -> str | None:
        """What workers of servers do not follow, by its name."""
        if changed := self.attributes():
            assert self._attributes is not None
            index, name, _ = changed[0]
            changed_part = self._attributes.objects[index]
            parts = self._model.module.named_modules(prefix="model")
            return next(f"{path}.{name}" for path, part in parts if part is changed_part)
        return "requires_grad" if self.requires_grad() is not None else None

    def check_layout(self) -> None:
        """Refuse other layers, and other parameters of the optimizer."""
        if not self._quiet and self._layout != self._current_layout():
            raise NotDistributable(
                "a callback replaced layers or parameters of the model, or changed which of them "
                "the optimizer has (add_param_group?), and the other replicas have models of their "
                "own; do it between two fits, or switch requires_grad at the beginning of an epoch."
            )

    def check_state(self) -> None:
        """Refuse a change of the optimizer's state, which other replicas have for themselves."""
        if not self._quiet and self._state != self._current_state():
            raise NotDistributable(
                "a callback changed the optimizer's state (model.load does that, too), which the "
                "other replicas do not follow; do it before fit, or change the weights alone: "
                "model.module.load_state_dict(...)."
            )

    def _groups(self) -> list[list[Any]]:
        optimizer = self._model.optimizer
        return [] if optimizer is None else [group["params"] for group in optimizer.param_groups]

    def _current_layout(self) -> list[int]:
        module = self._model.module
        shared = module.buffers() if self.in_common else ()
        parts = [*module.modules(), *module.parameters(), *shared]
        return [id(part) for part in parts + [p for group in self._groups() for p in group]]

    def _current_state(self) -> list[Any]:
        """What all replicas share may be written to, but not replaced."""
        return [
            (name, id(v), 0 if self.in_common else v._version)
            if isinstance(v, Tensor)
            else (name, v)
            for group in self._groups()
            for param in group
            for name, v in self._model.optimizer.state.get(param, {}).items()
        ]


def _requires_grad(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module.parameters()]


def share_attributes(module: nn.Module, replica: Replica) -> None:
    """The chief's switches and plain attributes, on every replica: one may be new. Collective."""
    parts = _modules(module)
    mine = None
    if replica.is_chief:
        known = module_attributes(module).everything()
        mine = [_requires_grad(module), [list(each) for each in known]]
    frozen, attributes = broadcast_tree(replica.collective, mine)
    if not replica.is_chief:
        for param, wanted in zip(module.parameters(), frozen, strict=True):
            param.requires_grad_(wanted)
        adopt(parts, attributes)


class CallTarget(Protocol):
    """What a call works on."""

    module: nn.Module
    callbacks: Any


def news(job: CallTarget, *, written: bool) -> dict[str, Any]:
    """On the chief: what its callbacks have made of the model."""
    changes: ChangeTracker = job.callbacks.changes
    state = [*job.module.parameters(), *job.module.buffers()]
    return {
        "weights": [t.detach() for t in state] if written else None,
        "requires_grad": changes.requires_grad(),
        "attributes": [list(each) for each in changes.attributes()],
    }


@torch.no_grad()
def heed(job: CallTarget, replica: Replica, told: dict[str, Any]) -> None:
    """Have the model as the chief's callbacks have made it."""
    weights, frozen, attributes = told["weights"], told["requires_grad"], told["attributes"]
    if not replica.is_chief:
        if weights is not None and replica.collective.live:  # a standby may share the parameters
            state = [*job.module.parameters(), *job.module.buffers()]
            for tensor, value in zip(state, weights, strict=True):
                tensor.copy_(value)
        for param, wanted in zip(job.module.parameters(), frozen or (), strict=False):
            param.requires_grad_(wanted)
        adopt(_modules(job.module), attributes)
    job.callbacks.changes.followed += bool(attributes)
    if weights is not None or frozen is not None or attributes:
        job.callbacks.changes.settle()
