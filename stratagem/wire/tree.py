"""Serialization of nested tensors, without pickle.

A tree is None, bool, int, float, str, Tensor, or a list, tuple, NamedTuple, dict or Counter of
trees; keys are text, numbers, None, or tuples of them. The bytes are a length, a JSON outline, then
the tensors in order. Decoding checks every length against the available bytes before it allocates.
Of a NamedTuple the names are encoded: decoding imports and calls nothing for them.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import Counter, namedtuple
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.wire.collective import Collective

Tree = Any
TREE_LIMIT = 1 << 36  # bytes of a tree from the network: optimizer state, a report, a batch
_HEAD = struct.Struct(">Q")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )
}
#: unsigned types, which torch can neither pickle nor index, and signed ones of the same size
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def encode(tree: Tree) -> Tensor:
    """Encode a tree as one flat uint8 tensor."""
    written, tensors = outlined(tree)
    outline = json.dumps(written).encode()
    head = torch.frombuffer(bytearray(_HEAD.pack(len(outline)) + outline), dtype=torch.uint8)
    return torch.cat([head, *(flat_bytes(tensor) for tensor in tensors)]) if tensors else head


def decode(data: Tensor) -> Tree:
    """Decode what `encode` returned; tensors are copies on the CPU."""
    view = data.numpy().data
    if len(view) < _HEAD.size:
        raise ValueError("a tree's bytes are cut short: no head")
    (length,) = _HEAD.unpack_from(view)
    start = _HEAD.size + length
    if start > len(view):
        raise ValueError(f"a tree's outline claims {length} bytes of {len(view)}")
    outline = json.loads(str(view[_HEAD.size : start], "utf-8"))
    reader = _TensorReader(data, start)
    tree = rebuilt(outline, reader.take)
    if reader.left:
        raise ValueError(f"{reader.left} bytes are left over behind a tree")
    return tree


def outlined(tree: Tree) -> tuple[Any, list[Tensor]]:
    """Return the JSON outline of a tree, and its tensors in order."""
    tensors: list[Tensor] = []
    return _outline(tree, tensors), tensors


class _TensorReader:
    """Copies tensors, in order, out of flat bytes."""

    def __init__(self, data: Tensor, at: int) -> None:
        self._data, self._at, self.left = data, at, len(data) - at

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size > self.left:
            raise ValueError(f"a tensor claims {size} bytes where {self.left} are left")
        flat = self._data.narrow(0, self._at, size).clone()
        self._at, self.left = self._at + size, self.left - size
        return (flat.view(dtype) if size else torch.empty(0, dtype=dtype)).reshape(shape)


def broadcast_tree(collective: Collective, tree: Tree = None, source: int = 0) -> Tree:
    """Return the source's tree on every replica; the source gets its own object."""
    if collective.size == 1:
        return tree
    if collective.rank == source:
        collective.broadcast_bytes(encode(tree), source)
        return tree
    return decode(collective.broadcast_bytes(None, source))


def gather_tree(collective: Collective, tree: Tree) -> list[Tree]:
    """Gather every replica's tree, in rank order."""
    if collective.size == 1:
        return [tree]
    return [decode(part) for part in collective.gather_bytes(encode(tree))]


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # view() checks the stride, even of one element
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _outline(tree: Tree, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        name = str(tree.dtype).removeprefix("torch.")
        if name not in _DTYPES or tree.layout != torch.strided:
            raise NotDistributable(
                f"a {tree.layout} tensor of {tree.dtype} cannot travel between replicas; "
                "convert it to a dense tensor of an ordinary type first."
            )
        tensors.append(tree)
        return {"t": [name, list(tree.shape)]}
    if isinstance(tree, dict):
        counts = isinstance(tree, Counter)
        if not counts and all(isinstance(key, str) for key in tree):
            return {"d": [[key, _outline(value, tensors)] for key, value in tree.items()]}
        pairs = [[_outline(_key(k), []), _outline(v, tensors)] for k, v in tree.items()]
        return {"c" if counts else "m": pairs}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = type(tree)
        parts = [_outline(value, tensors) for value in tree]
        return {"n": [kind.__module__, kind.__qualname__, list(tree._fields), parts]}
    if isinstance(tree, list | tuple):
        tag = "l" if isinstance(tree, list) else "u"
        return {tag: [_outline(value, tensors) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"v": tree}
    raise NotDistributable(
        f"a {type(tree).__name__} cannot travel between replicas; use tensors, numbers, text, "
        "and lists, tuples or dicts of them."
    )


def _key(key: object) -> object:
    parts = key if isinstance(key, tuple) else (key,)
    if all(part is None or isinstance(part, bool | int | float | str) for part in parts):
        return key
    raise NotDistributable(
        f"a dict with a {type(key).__name__} as a key cannot travel between replicas; use text, "
        "numbers, or tuples of them as keys."
    )


def rebuilt(outline: Any, take: Callable[[torch.dtype, list[int]], Tensor]) -> Tree:
    """Return the tree of an outline; `take` returns its tensors in order."""
    ((tag, body),) = outline.items()
    if tag == "v":
        return body
    if tag == "t":
        dtype, shape = _DTYPES[body[0]], [int(n) for n in body[1]]
        if any(n < 0 for n in shape):
            raise ValueError("a tensor's shape is negative")
        return take(dtype, shape)
    if tag == "n":
        module, qualname, fields, inner = body
        return _named(module, qualname, tuple(fields), rebuilt({"u": inner}, take))
    if tag == "d":
        return {key: rebuilt(value, take) for key, value in body}
    if tag in "mc":
        pairs = {rebuilt(key, take): rebuilt(value, take) for key, value in body}
        return Counter(pairs) if tag == "c" else pairs
    return {"l": list, "u": tuple}[tag](rebuilt(value, take) for value in body)


def _named(module: str, qualname: str, fields: tuple[str, ...], parts: tuple[Tree, ...]) -> Tree:
    """Return a NamedTuple of the class of this name, or of a similar one if it is not loaded."""
    if len(fields) != len(parts):
        raise ValueError(f"{len(parts)} values for the {len(fields)} fields of a NamedTuple")
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = vars(found).get(name) if isinstance(found, ModuleType | type) else None
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    if not is_tuple or getattr(found, "_fields", None) != fields:
        found = _made(module, name, fields)
    return tuple.__new__(found, parts)


@lru_cache(maxsize=64)
def _made(module: str, name: str, fields: tuple[str, ...]) -> type[Any]:
    return namedtuple(name, fields, rename=True, module=module)
