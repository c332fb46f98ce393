"""What a model is besides its tensors: numbers, words and switches that code reads as it runs.

    attributes     of its modules and of the loss (`Dropout.p`, `temperature`, `training`), and of
                   objects that lie there, such as a configuration
    names          that its forward, or the loss, looks up outside: globals, attributes of globals,
                   closures
    requires_grad  of each parameter

Callbacks change them on the chief; the other replicas follow, or the change is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.errors import NotDistributable

_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, type(None))
_LONGEST = 256  # a longer list or dict is data, not a setting
_OUTSIDE = ": "  # between a function and a name that it looks up
_NOT = object()


@dataclass
class Traits:
    """All of them at one moment."""

    #: what can travel, by where it lies
    plain: dict[str, Any] = field(default_factory=dict)
    #: what cannot: there it must stay the same object
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Held:
    """A tensor that is no buffer; `is` and its version tell whether it is still the same."""

    tensor: Tensor
    version: int
    address: int

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Held) and self.tensor is other.tensor
            and (self.version, self.address) == (other.version, other.address)
        )  # fmt: skip


def look(module: nn.Module, loss: Any) -> Traits:
    """The traits of a model that is trained with this loss."""
    found = Traits()
    for place, holder, name in _places(module, loss):
        value = _read(holder, name)
        copied = _copy(value)
        if copied is not _NOT:
            found.plain[place] = copied
        elif not isinstance(value, Tensor):  # results that a module keeps would keep their graph
            found.objects[place] = value
    return found


def changes(before: Traits, after: Traits) -> dict[str, Any]:
    """What is another one now, ready to travel; refuses what cannot."""
    for place, value in after.objects.items():
        known = place in before.objects or place in before.plain
        if known and value is not before.objects.get(place, _NOT):
            raise NotDistributable(
                f"a callback replaced {place!r} of the model, or of its loss, by a "
                f"{type(value).__name__}, which the other replicas cannot follow; do it before "
                "fit, or change numbers, words and weights only."
            )
    if gone := [place for place in before.objects if place not in after.objects]:
        raise NotDistributable(
            f"a callback took {gone[0]!r} away from the model, which the other replicas cannot "
            "follow; do it before fit."
        )
    return {
        place: value.tensor.detach() if isinstance(value, _Held) else value
        for place, value in after.plain.items()
        if place not in before.plain or before.plain[place] != value
    }


def adopt(module: nn.Module, loss: Any, told: dict[str, Any]) -> None:
    """Take over what the chief's model has become."""
    if not told:
        return
    functions = _functions(module, loss)
    known = {place: (holder, name) for place, holder, name in _places(module, loss)}
    above = {place.rpartition(".")[0]: holder for place, (holder, _) in reversed(known.items())}
    for place, value in told.items():
        if place in known:
            _write(*known[place], value)
        elif _OUTSIDE in place:  # nobody has looked it up here yet
            where, _, name = place.partition(_OUTSIDE)
            if where in functions:
                functions[where].__globals__[name] = value
        else:
            where, _, name = place.rpartition(".")
            _write(above[where], name, value)


def names(module: nn.Module, loss: Any) -> dict[str, Any]:
    """What code looks up outside of the model, as it is here: numbers and words. Processes that
    have been running for a while may still have what was there before."""
    plain = look(module, loss).plain
    return {
        place: value for place, value in plain.items()
        if _OUTSIDE in place and not isinstance(value, _Held)
    }  # fmt: skip


def _places(module: nn.Module, loss: Any) -> Iterator[tuple[str, Any, str]]:
    """Name, holder and key of everything; the same order and names on every replica."""
    for root, tree in _trees(module, loss):
        for path, part in _open(tree):
            yield from _of_module(f"{root}.{path}" if path else root, part)
    own = _own(loss)
    if not isinstance(own, nn.Module | FunctionType):  # a method, or an object that is called
        yield from _of_object("loss", getattr(own, "__self__", own))
    for name, function in _functions(module, loss).items():
        yield from _looked_up(name, function)


def _own(loss: Any) -> Any:
    """What the user gave as a loss."""
    return getattr(loss, "function", None)


def _trees(module: nn.Module, loss: Any) -> Iterator[tuple[str, nn.Module]]:
    yield "model", module
    if isinstance(_own(loss), nn.Module):
        yield "loss", _own(loss)


def _open(tree: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules in it, but for compiled ones: what those read is not to be seen."""
    for path, part in tree.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            yield path, part


def _functions(module: nn.Module, loss: Any) -> dict[str, FunctionType]:
    """Everything that runs and is not torch's."""
    found: dict[str, FunctionType] = {}
    for _, tree in _trees(module, loss):
        for _, part in _open(tree):
            _note(found, type(part).__name__, type(part).forward)
    own = _own(loss)
    called = own if isinstance(own, FunctionType) else getattr(own, "__func__", type(own).__call__)
    _note(found, "loss", called)
    return found


def _note(functions: dict[str, FunctionType], name: str, function: Any) -> None:
    """This function, unless it is torch's, and those of the same file that it calls."""
    if not isinstance(function, FunctionType) or function in functions.values():
        return
    if str(function.__module__).startswith("torch."):
        return
    while name in functions:
        name += "'"
    functions[name] = function
    for used in function.__code__.co_names:
        called = function.__globals__.get(used)
        if isinstance(called, FunctionType) and called.__module__ == function.__module__:
            _note(functions, used, called)


def _of_module(at: str, module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    attributes = vars(module)
    for name, value in attributes.items():
        if name not in _TORCHS:
            yield f"{at}.{name}", attributes, name
            if not callable(value):  # a configuration, maybe
                yield from _of_object(f"{at}.{name}", value)
    for name in module._modules:
        yield f"{at}.{name}", module._modules, name
    for name, param in module._parameters.items():
        if param is not None:
            yield f"{at}.{name}.requires_grad", param, "requires_grad"


def _of_object(at: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    """What is plain in it; the rest of an object is its own affair."""
    if isinstance(value, nn.Module | Tensor):
        return
    inside = getattr(value, "__dict__", {})
    for name in inside:
        if _copy(inside[name]) is not _NOT:
            yield f"{at}.{name}", inside, name


def _looked_up(name: str, function: FunctionType) -> Iterator[tuple[str, Any, str]]:
    """Globals, attributes of them (`config.size`, of a file, a class or an object), closures."""
    code = function.__code__
    at = f"{name}{_OUTSIDE}"
    for used in code.co_names:
        if used not in function.__globals__:
            continue
        value = function.__globals__[used]
        if _copy(value) is not _NOT:
            yield at + used, function.__globals__, used
        elif isinstance(getattr(value, "__dict__", None), dict | MappingProxyType):
            for inner in code.co_names:
                if inner in vars(value) and _copy(vars(value)[inner]) is not _NOT:
                    yield f"{at}{used}.{inner}", value, inner
    for used, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if _copy(_read(cell, "cell_contents")) is not _NOT:
            yield at + used, cell, "cell_contents"


def _read(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder[name]
    if isinstance(holder, CellType):
        return getattr(holder, name, _NOT)  # an empty cell has nothing
    return getattr(holder, name)


def _write(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        before = holder.get(name)
        if isinstance(before, Tensor) and isinstance(value, Tensor):
            value = value.to(before.device)
        holder[name] = value
    else:
        setattr(holder, name, value)


def _copy(value: Any) -> Any:
    """The value, apart from later changes; `_NOT` where it cannot travel."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return _copy(value.item())
    if isinstance(value, Tensor):
        travels = value.grad_fn is None and value.layout is torch.strided
        return _Held(value, value._version, value.data_ptr()) if travels else _NOT
    if type(value) in (list, tuple) and len(value) <= _LONGEST:
        items = [_copy(item) for item in value]
        return _NOT if _any_not(items) else type(value)(items)
    if type(value) is dict and len(value) <= _LONGEST and all(type(key) is str for key in value):
        entries = {key: _copy(item) for key, item in value.items()}
        return _NOT if _any_not(entries.values()) else entries
    return _NOT


def _any_not(items: Any) -> bool:
    return any(item is _NOT or isinstance(item, _Held) for item in items)
