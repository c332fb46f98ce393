"""What a model is besides its tensors: numbers, words and switches that code reads as it runs.

    attributes     of its modules and of the loss (`Dropout.p`, `temperature`, `training`), and of
                   objects that lie there, such as a configuration
    names          that its forward, or the loss, looks up outside: globals, attributes of globals,
                   closures
    requires_grad  of each parameter
    buffers        of the loss, such as class weights; those of the model are weights
    data           the same of the dataset, and of objects that lie there, such as a transform

Callbacks change them on the chief; the other replicas follow, or the change is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from stratagem.errors import NotDistributable
from stratagem.frontends.snapshots import NOT, PLAIN, is_light, pack, take, unpack

_TORCHS = frozenset(vars(nn.Module())) - {"training"}
#: kinds of places
_ATTRIBUTE, _LAYER, _FROZEN, _OUTSIDE = "attribute", "layer", "frozen", "outside"
_BUFFER, _INSIDE = "buffer", "inside"


class Place(NamedTuple):
    """Some values side by side: of one module, one object, one function."""

    kind: str
    at: str

    def told(self, name: str) -> str:
        """One of them, for people."""
        if self.kind == _FROZEN:
            return f"{self.at}.{name}.requires_grad"
        return f"{self.at}: {name}" if self.kind == _OUTSIDE else f"{self.at}.{name}"


class Traits:
    """All of them at one moment."""

    def __init__(self) -> None:
        #: what can travel
        self.plain: dict[Place, dict[str, Any]] = {}
        #: what cannot: there it must stay the same object
        self.objects: dict[Place, dict[str, Any]] = {}


def look(module: nn.Module, loss: Any, data: Any = None) -> Traits:
    """The traits of a model that is trained with this loss, on this dataset."""
    found = Traits()
    for place, values in _places(module, loss, data):
        plain, objects = {}, {}
        for name, value in values.items():
            if (taken := take(value)) is not NOT:
                plain[name] = taken
            elif place.kind != _INSIDE and not isinstance(value, Tensor):
                objects[name] = value  # not results that are kept: they would keep their graph
        found.plain[place], found.objects[place] = plain, objects
    return found


def changes(before: Traits, after: Traits) -> list[Any]:
    """What is another one now, ready to travel; refuses what cannot."""
    for place, objects in after.objects.items():
        _refuse_others(place, objects, before)
    found = []
    for place, plain in after.plain.items():
        known = before.plain.get(place, {})
        if plain != known:
            found += [
                [*place, name, pack(value, place.told(name))]
                for name, value in plain.items() if name not in known or known[name] != value
            ]  # fmt: skip
    return found


def _refuse_others(place: Place, objects: dict[str, Any], before: Traits) -> None:
    then, plain = before.objects.get(place, {}), before.plain.get(place, {})
    for name, value in objects.items():
        if (name in then or name in plain) and value is not then.get(name, NOT):
            raise NotDistributable(
                f"a callback replaced {place.told(name)!r} of the model, or of its loss, by a "
                f"{type(value).__name__}, which the other replicas cannot follow; do it before "
                "fit, or change numbers, words and weights only."
            )
    for name in then:
        if name not in objects:
            raise NotDistributable(
                f"a callback took {place.told(name)!r} away from the model, which the other "
                "replicas cannot follow; do it before fit."
            )


def say(change: list[Any]) -> str:
    """One of the changes, for people."""
    kind, at, name, _ = change
    return Place(kind, at).told(name)


def adopt(module: nn.Module, loss: Any, told: list[Any], data: Any = None) -> None:
    """Take over what the chief's model has become."""
    if not told:
        return
    holders = {tuple(place): holder for place, holder in _holders(module, loss, data)}
    functions = _functions(module, loss)
    home = next((p.device for p in module.parameters()), torch.device("cpu"))
    for kind, at, name, packed in told:
        value = unpack(packed, home)
        if kind == _OUTSIDE:
            if at in functions:
                _write_outside(functions[at], name, value)
        elif kind == _FROZEN:
            holders[kind, at][name].requires_grad_(value)
        else:
            _write(holders[kind, at], name, value)


def names(module: nn.Module, loss: Any) -> list[Any]:
    """What code looks up outside of the model, as it is here: numbers and words. Processes that
    have been running for a while may still have what was there before."""
    return [
        [*place, name, pack(value, name)] for place, plain in look(module, loss).plain.items()
        if place.kind == _OUTSIDE for name, value in plain.items() if is_light(value)
    ]  # fmt: skip


def _places(
    module: nn.Module, loss: Any, data: Any
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """All values, by where they lie."""
    for place, holder in _holders(module, loss, data):
        if place.kind == _FROZEN:
            yield place, {name: p.requires_grad for name, p in holder.items() if p is not None}
        elif place.kind == _ATTRIBUTE:
            yield place, {name: holder[name] for name in holder.keys() - _TORCHS}
        else:
            yield place, holder
    for name, function in _functions(module, loss).items():
        yield Place(_OUTSIDE, name), _looked_up(function)


def _holders(
    module: nn.Module, loss: Any, data: Any
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Where attributes, layers and parameters lie; the same places on every replica."""
    for root, tree in _trees(module, loss):
        for path, part in _open(tree):
            at = f"{root}.{path}" if path else root
            attributes = part.__dict__
            yield Place(_ATTRIBUTE, at), attributes
            for name in attributes.keys() - _TORCHS:
                value = attributes[name]
                if type(value) not in PLAIN and not callable(value):
                    yield from _object(f"{at}.{name}", value)
            if attributes["_modules"]:
                yield Place(_LAYER, at), attributes["_modules"]
            if attributes["_parameters"]:
                yield Place(_FROZEN, at), attributes["_parameters"]
            if attributes["_buffers"] and root == "loss":
                yield Place(_BUFFER, at), attributes["_buffers"]
    own = _own(loss)
    if not isinstance(own, nn.Module | FunctionType):  # a method, or an object that is called
        yield from _object("loss", getattr(own, "__self__", own))
    for at, each in _datasets(data):
        yield from _object(at, each)
        for name, value in sorted(getattr(each, "__dict__", {}).items()):
            if type(value) not in PLAIN and not isinstance(value, FunctionType | type):
                yield from _object(f"{at}.{name}", value)


def _datasets(data: Any, at: str = "data") -> Iterator[tuple[str, Any]]:
    """The dataset, or those that it is made of; not tensors alone, which are the data itself."""
    while isinstance(data, Subset):
        data = data.dataset
    if isinstance(data, ConcatDataset):
        for place, each in enumerate(data.datasets):
            yield from _datasets(each, f"{at}.datasets[{place}]")
    elif data is not None and not (at == "data" and isinstance(data, TensorDataset)):
        yield at, data


def _object(at: str, value: Any) -> Iterator[tuple[Place, dict[str, Any]]]:
    """An object, such as a configuration: what is plain in it; the rest is its own affair."""
    inside = None if isinstance(value, nn.Module | Tensor) else getattr(value, "__dict__", None)
    if isinstance(inside, dict):
        yield Place(_INSIDE, at), inside


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
        for kind in dict.fromkeys(type(part) for part in tree.modules()):
            if not kind.__module__.startswith("torch."):
                _note(found, kind.__name__, kind.forward)
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


def _looked_up(function: FunctionType) -> dict[str, Any]:
    """Globals, attributes of them (`config.size`, of a file, a class or an object), closures."""
    code, found = function.__code__, {}
    for used in code.co_names:
        if used not in function.__globals__:
            continue
        value = function.__globals__[used]
        if take(value) is not NOT:
            found[used] = value
        elif isinstance(inside := getattr(value, "__dict__", None), dict | MappingProxyType):
            found |= {
                f"{used}.{inner}": inside[inner] for inner in code.co_names
                if inner in inside and take(inside[inner]) is not NOT
            }  # fmt: skip
    for used, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if take(value := _content(cell)) is not NOT:
            found[used] = value
    return found


def _content(cell: CellType) -> Any:
    return getattr(cell, "cell_contents", NOT)  # an empty one has nothing


def _write_outside(function: FunctionType, name: str, value: Any) -> None:
    used, _, inner = name.partition(".")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if inner:
        if used in function.__globals__:
            setattr(function.__globals__[used], inner, value)
    elif used in cells:
        cells[used].cell_contents = value
    else:
        _write(function.__globals__, used, value)


def _write(holder: dict[str, Any], name: str, value: Any) -> None:
    before = holder.get(name)
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        value = value.to(before.device)
    holder[name] = value
