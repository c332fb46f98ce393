"""Values as they are at one moment, to be compared later, and as they travel to other replicas.

Numbers, words and switches; lists, tuples, dicts, sets and queues of them, and of tensors and numpy
arrays. What is large is looked at in some places only, so that looking costs little however large
it is; it is copied, as a whole, only where it has changed.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.errors import NotDistributable

PLAIN = frozenset({bool, int, float, str, type(None)})
#: no snapshot: it cannot travel
NOT = object()

_FEW, _MANY = 256, 4096  # entries that are all looked at: of any kind; numbers and words
_PLACES = 64  # of a longer list
_WHOLE, _SPREAD = 1 << 18, 1024  # bytes of an array that is read whole; numbers of a larger one
_DEEPEST = 8
_MOST = 1 << 20  # entries that travel
_HEAVIEST = 1 << 30  # bytes of an array that travel

_ROWS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_TABLES = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict}
_NAMES: dict[type, str] = {kind: name for name, kind in (_ROWS | _TABLES).items()}
#: what a defaultdict may make that other processes know by name
_MAKERS = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)}


class Held:
    """A tensor; `is` and its version tell whether it is still the same."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._mark = tensor, (tensor._version, tensor.data_ptr())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held):
            return False
        return self.tensor is other.tensor and self._mark == other._mark

    __hash__ = None  # type: ignore[assignment]


class Sampled:
    """Something large, or without a version: a mark tells whether it is still the same."""

    def __init__(self, value: Any, mark: Any) -> None:
        self.value, self._mark = value, (type(value), mark)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sampled) and self._mark == other._mark

    __hash__ = None  # type: ignore[assignment]


def take(value: Any) -> Any:
    """The value, apart from later changes; `NOT` where it cannot travel."""
    return value if type(value) in PLAIN else _take(value, _FEW, _DEEPEST)


def _take(value: Any, most: int, deepest: int) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, np.generic):
        return take(value.item())
    if isinstance(value, Tensor):
        travels = value.grad_fn is None and value.layout is torch.strided
        return Held(value) if travels else NOT
    if kind is np.ndarray:
        return NOT if value.dtype.hasobject else Sampled(value, _mark(value))
    if kind not in _NAMES or deepest == 0 or _maker(value) is NOT:
        return NOT
    if len(value) <= _MANY and _has_only_plain(value):
        return value.copy() if hasattr(value, "copy") else value
    if len(value) > most:
        some = _take(_some(value), most, deepest)
        return NOT if some is NOT else Sampled(value, (len(value), some))
    return _copied(value, lambda each: _inner(each, most, deepest - 1))


def _has_only_plain(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else ()
    return PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, items))


def _inner(value: Any, most: int, deepest: int) -> Any:
    """Of something in a container, which may be a weight of the model: then it is one's own."""
    if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad):
        return NOT
    return _take(value, most, deepest)


def _copied(value: Any, act: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _TABLES.values():
        items = {key: act(item) for key, item in value.items()}
        if any(item is NOT for item in items.values()) or not all(map(_is_key, items)):
            return NOT
        return defaultdict(value.default_factory, items) if kind is defaultdict else kind(items)
    if kind in (set, frozenset):
        return kind(value) if all(map(_is_key, value)) else NOT
    found = [act(item) for item in value]
    if any(item is NOT for item in found):
        return NOT
    return deque(found, value.maxlen) if kind is deque else kind(found)


def _is_key(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_key, value)))


def _maker(value: Any) -> Any:
    """The name of what a defaultdict makes; `NOT` where others do not know it."""
    if type(value) is not defaultdict or value.default_factory is None:
        return None
    name = getattr(value.default_factory, "__name__", None)
    return name if _MAKERS.get(str(name)) is value.default_factory else NOT


def _some(value: Any) -> list[Any]:
    """Entries of a long container, the first and the last among them where it has an order."""
    if isinstance(value, list | tuple):
        return [value[i * (len(value) - 1) // (_PLACES - 1)] for i in range(_PLACES)]
    ends: list[Iterable[Any]] = [value] if isinstance(value, set | frozenset) else [
        value, reversed(value)
    ]
    found = [each for end in ends for each in islice(end, _PLACES // len(ends))]
    return [[key, value[key]] for key in found] if isinstance(value, dict) else found


def _mark(array: np.ndarray[Any, Any]) -> Any:
    if array.nbytes <= _WHOLE:
        return array.shape, array.dtype.str, zlib.crc32(array.tobytes())
    places = np.linspace(0, array.size - 1, _SPREAD, dtype=np.int64)
    return array.shape, array.dtype.str, zlib.crc32(array.flat[places].tobytes())


def is_light(snapshot: Any) -> bool:
    """Whether it has only numbers and words in it, and not many."""
    if isinstance(snapshot, Held | Sampled):
        return False
    inside = snapshot.values() if isinstance(snapshot, dict) else snapshot
    return type(snapshot) not in _NAMES or all(map(is_light, inside))


def pack(snapshot: Any, told: str) -> Any:
    """For `wire.tree`: containers as a list that begins with their name. Refuses what is too much;
    `told` is what it is, for people."""
    if isinstance(snapshot, Held):
        return ["tensor", snapshot.tensor.detach(), snapshot.tensor.device.type]
    if isinstance(snapshot, Sampled):
        return _pack_whole(snapshot.value, told)
    name = _NAMES.get(type(snapshot))
    if name is None:
        return snapshot
    if name in _TABLES:
        pairs = [[pack(key, told), pack(item, told)] for key, item in snapshot.items()]
        return [name, pairs, _maker(snapshot)]
    longest = snapshot.maxlen if name == "deque" else None
    return [name, [pack(item, told) for item in snapshot], longest]


def _pack_whole(value: Any, told: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.nbytes <= _HEAVIEST and value.dtype.kind in "biufc":
            try:
                return ["array", torch.from_numpy(value.copy()), None]
            except TypeError as error:
                raise _too_much(value, told) from error
        raise _too_much(value, told)
    whole = _take(value, _MOST, _DEEPEST) if len(value) <= _MOST else NOT
    if whole is NOT or isinstance(whole, Sampled):
        raise _too_much(value, told)
    return pack(whole, told)


def _too_much(value: Any, told: str) -> NotDistributable:
    size = f"{value.nbytes} bytes" if isinstance(value, np.ndarray) else f"{len(value)} entries"
    return NotDistributable(
        f"a callback changed {told!r}, a {type(value).__name__} of {size} that the other replicas "
        "cannot follow: it is too large, or has things of other kinds in it; change it between two "
        "fits, or keep what changes in a number, a word or a tensor beside it."
    )


def unpack(tree: Any, home: torch.device) -> Any:
    """What `pack` made one from; tensors of accelerators on this replica's."""
    if not isinstance(tree, list):
        return tree
    kind, body, extra = tree
    if kind == "tensor":
        return body if extra == "cpu" else body.to(home)
    if kind == "array":
        return body.numpy()
    if kind in _TABLES:
        items = {unpack(key, home): unpack(item, home) for key, item in body}
        return defaultdict(_MAKERS.get(extra), items) if kind == "defaultdict" else (
            _TABLES[kind](items)
        )
    found = [unpack(item, home) for item in body]
    return deque(found, extra) if kind == "deque" else _ROWS[kind](found)
