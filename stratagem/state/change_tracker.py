"""Tracks which parts of a model and its optimizer have changed since all processes agreed.

A tracker remembers a state (`mark`) and later returns the differences from it (`changes`):

    TensorTracker      tensors, by version and memory; `closely`: by content, too
    AttributeTracker   attributes of some objects, such as a module's mode
    KeptState          an optimizer's state that servers hold

`layout`, `requires_grad`, `state_of` and `snapshot` return descriptions to compare; `difference`
returns the keys that differ. Callbacks of `fit`, custom loops, Keras' drivers, servers and standbys
use these between two steps.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable

#: the number of an object, the name of its attribute, and the new value
Change = tuple[int, str, Any]

#: types that are compared by value
PLAIN = frozenset({bool, int, float, str, type(None)})
_COLLECTIONS = (list, tuple, dict, set, frozenset)
_MOST = 256  # the longest list or dict that is sent; longer ones are taken for data
#: attributes that every module has
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_NOT = object()
_FEW = 1 << 16  # below so many bytes, a hash is faster than four sums


class TensorTracker:
    """Tells which tensors were written to, or moved to other memory, since the mark."""

    def __init__(self, tensors: Sequence[Tensor] = (), *, closely: bool = False) -> None:
        self._tensors = tensors
        self.mark(closely=closely)

    def mark(self, tensors: Sequence[Tensor] | None = None, *, closely: bool = False) -> None:
        """Remember the tensors as they are.

        `closely`: remember their content, too, to see writes that autograd does not (`p.data`).
        """
        self._tensors = self._tensors if tensors is None else tensors
        self._digests = [digest(t) for t in self._tensors] if closely else None
        self._marks = {id(t): _place(t) for t in self._tensors}

    def changes(self, tensors: Sequence[Tensor] | None = None) -> list[int]:
        """Return the positions of tensors that have changed since the mark.

        A new tensor counts if it was ever written to, and always after a close mark.
        """
        known, closely = self._marks, self._digests is not None
        found = [
            i
            for i, t in enumerate(self._tensors if tensors is None else tensors)
            if known.get(id(t), None if closely else (0, t.data_ptr())) != _place(t)
        ]
        return [*found, *self._slipped()] if closely else found

    def _slipped(self) -> list[int]:
        """Return the positions of tensors whose content changed unseen by autograd."""
        known, digests = self._marks, self._digests or ()
        return [
            i
            for i, (t, was) in enumerate(zip(self._tensors, digests, strict=False))
            if known[id(t)] == _place(t) and digest(t) != was
        ]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; torch does not count inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> tuple[int, int]:
    return version_of(tensor), tensor.data_ptr()


class AttributeTracker:
    """Tracks attributes of objects that can be sent to other processes.

    These are plain values and tensors; with `nested` also short lists, tuples and dicts (with
    string keys) of them.
    """

    def __init__(
        self, objects: Sequence[Any], but: Collection[str] = (), *, nested: bool = False
    ) -> None:
        self.objects, self._but, self._nested = objects, but, nested
        self.mark()

    def mark(self) -> None:
        """Remember the attributes as they are."""
        #: may be compared with another tracker's
        self.seen = self._look()

    def changes(self) -> list[Change]:
        """Return the attributes that are new or changed since the mark."""
        now = self._look()
        if now == self.seen:
            return []
        return [
            (i, name, _portable(vars(self.objects[i])[name]))
            for i, (old, new) in enumerate(zip(self.seen, now, strict=True))
            for name, seen in new.items()
            if name not in old or old[name] != seen
        ]

    def everything(self) -> list[Change]:
        """Return all attributes, for a copy that was made earlier."""
        return [
            (i, name, _portable(vars(self.objects[i])[name]))
            for i, each in enumerate(self.seen)
            for name in each
        ]

    def values(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return the objects, each with the values of the attributes known at the mark."""
        pairs = zip(self.objects, self.seen, strict=True)
        return [(obj, {name: vars(obj)[name] for name in seen}) for obj, seen in pairs]

    def _look(self) -> list[dict[str, Any]]:
        but, look, found = self._but, _sent_deeply if self._nested else _sent, []
        for obj in self.objects:
            seen = {
                n: v if type(v) in PLAIN else look(v) for n, v in vars(obj).items() if n not in but
            }
            found.append({name: value for name, value in seen.items() if value is not _NOT})
        return found


def snapshot(value: Any, other: Callable[[Any], Any], *, sendable: bool = False) -> Any:
    """Return a description of a value, which differs after the value has changed.

    Collections are described by their content, and values that are not plain by `other(value)`.
    `sendable`: return _NOT for collections that cannot be sent.
    """
    if type(value) in PLAIN:
        return value
    if not isinstance(value, _COLLECTIONS) or (sendable and not _sendable(value)):
        return other(value)
    names, each = ([*value], value.values()) if isinstance(value, dict) else ([], value)
    inside = [v if type(v) in PLAIN else snapshot(v, other, sendable=sendable) for v in each]
    return _NOT if sendable and _NOT in inside else (type(value), names, inside)


def _sendable(value: Any) -> bool:
    kind = type(value)
    if kind not in (list, tuple, dict) or len(value) > _MOST:
        return False
    return kind is not dict or all(type(key) is str for key in value)


def _sent(value: Any) -> Any:
    """Describe a tensor or a numpy number; other values are not sent."""
    if isinstance(value, np.generic):
        return value.item()
    plain = type(value) is Tensor and value.grad_fn is None and value.layout is torch.strided
    plain = plain and not value.is_meta  # Keras builds a model on tensors without data
    return (Tensor, id(value), *_place(value)) if plain else _NOT


_sent_deeply = partial(snapshot, other=_sent, sendable=True)


def _portable(value: Any) -> Any:
    """Return a value as it is sent to other processes."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    return type(value)(map(_portable, value)) if isinstance(value, list | tuple) else value


def adopt(objects: Sequence[Any], changes: Sequence[Change]) -> None:
    """Make the same changes to a copy; a tensor goes to the device of its predecessor."""
    for index, name, value in changes:
        attributes = vars(objects[index])
        before = attributes.get(name)
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            value = value.to(before.device)
        attributes[name] = value


def parts_of(*modules: nn.Module) -> list[nn.Module]:
    """Return all modules but TorchScript's, whose attributes cannot be read."""
    parts = (part for module in modules for part in module.modules())
    return [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]


def module_attributes(*modules: nn.Module) -> AttributeTracker:
    """Track `training` and all attributes that are not torch's own, of modules and submodules."""
    return AttributeTracker(parts_of(*modules), MODULE_ATTRIBUTES - {"training"}, nested=True)


def requires_grad(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module.parameters()]


def layout(module: nn.Module, *, buffers: bool = True, aliases: bool = False) -> dict[str, int]:
    """Return the ids of submodules, parameters and buffers by name; `aliases`: by all names."""
    once = not aliases
    kinds: list[Iterable[tuple[str, Any]]] = [
        module.named_modules(remove_duplicate=once),
        module.named_parameters(remove_duplicate=once),
        module.named_buffers(remove_duplicate=once) if buffers else (),
    ]
    return {name: id(each) for kind in kinds for name, each in kind}


def difference(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """Return the keys that are new, gone, or have another value."""
    if before == now:
        return []
    return [n for n in {**before, **now} if before.get(n, _NOT) != now.get(n, _NOT)]


def state_of(
    optimizer: Optimizer, params: Iterable[Tensor], *, versions: bool = True
) -> dict[tuple[int, str], Any]:
    """Return a description of an optimizer's state, by parameter number and name.

    `versions`: tensors that are written in place count as changed.
    """
    state = optimizer.state
    return {
        (i, name): (id(v), version_of(v) if versions else 0) if isinstance(v, Tensor) else v
        for i, param in enumerate(params)
        for name, v in dict.get(state, param, {}).items()
    }


class _State(defaultdict[Any, Any]):
    """An optimizer's state that knows whether it was cleared, even while empty."""

    cleared = False
    #: whether the servers have gone on since it was read; then it is not shown
    stale = False

    def clear(self) -> None:
        self.cleared, self.stale = True, False
        super().clear()


def _shown(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def read(state: _State, *args: Any) -> Any:
        if state.stale:
            raise NotDistributable(sentence("servers", "optimizer state read in a loop"))
        return plain(state, *args)

    return read


for _name in (
    "__contains__",
    "__getitem__",
    "__iter__",
    "__len__",
    "get",
    "items",
    "keys",
    "values",
):
    setattr(_State, _name, _shown(_name))


class KeptState:
    """Tracks the state of a torch optimizer, which servers hold, in the worker's process."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer, self._params = optimizer, params
        self.mark()

    def mark(self) -> None:
        """Remember the state as it is."""
        before = self._optimizer.state
        self._state = _State(dict, dict.items(before))
        self._state.stale = getattr(before, "stale", False)
        self._optimizer.state = self._state
        self._marks = state_of(self._optimizer, self._params)

    def changes(self) -> dict[int, dict[str, Any]]:
        """Return the states that were replaced since the mark, by parameter."""
        state = self._optimizer.state
        found = {i for i, _ in difference(self._marks, state_of(self._optimizer, self._params))}
        everything = state is not self._state or self._state.cleared
        return {
            i: dict(dict.get(state, param, {}))
            for i, param in enumerate(self._params)
            if everything or i in found
        }

    def end(self) -> None:
        """Give the optimizer a plain state again."""
        self._optimizer.state = defaultdict(dict, dict.items(self._optimizer.state))

    def gone_on(self) -> None:
        """Refuse that the state is read before `mark`: the servers have a newer one."""
        self._state.stale = True


@torch.no_grad()
def digest(tensor: Tensor) -> list[int]:
    """Return a hash of a tensor's bits, or several sums of them for a large tensor."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(bits) <= _FEW:
        hashed = hashlib.sha256(bits.cpu().numpy().tobytes()).digest()
        return [int.from_bytes(hashed[:8], "big", signed=True)]
    whole = len(bits) - len(bits) % 4
    words = bits[:whole].view(torch.int32)
    sums = [words.sum(), words[: len(words) // 2].sum(), words[::2].sum(), bits[whole:].sum()]
    found: list[int] = torch.stack(sums).tolist()
    return found
