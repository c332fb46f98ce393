"""Objects for our own children: cloudpickle, with large arrays left in shared memory.

Only a process that we forked ourselves ever reads these bytes. Classes and functions of
`__main__` travel by value, so unguarded scripts and notebooks work; a large array is copied once
into a segment that every child maps, so N children do not cost N copies. The mapping is private:
parameters are among these arrays, and what one child writes must not reach another.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import mmap
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stratagem.compat.torch_names import OpOverload, OpOverloadPacket, parametrized
from stratagem.errors import StratagemError, UsageError
from stratagem.wire.segment import Segment
from stratagem.wire.tree import SIGNED, flat_bytes

log = logging.getLogger("stratagem")

_LARGE = 1 << 16
#: tried in turn to reduce an object; NotImplemented leaves it to the next one
_reducers: list[Callable[[Any], Any]] = []


def register(reduce: Callable[[Any], Any]) -> None:
    """Register how a front end's own objects are reduced."""
    if reduce not in _reducers:
        _reducers.append(reduce)


class _AnswerPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a child's answer, with everything within the message."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor:
            if _is_bytes_alone(obj):  # torch takes ten times as long
                return _copied, (bytearray(flat_bytes(obj).numpy()), obj.dtype, tuple(obj.shape))
            if obj.dtype in SIGNED:  # torch cannot read its own pickle of these
                return _unsigned, (obj.view(SIGNED[obj.dtype]), obj.dtype)
        return super().reducer_override(obj)


class _Pickler(_AnswerPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.segments: list[Segment] = []
        #: by name, the objects of `__main__` that are sent and can be found there
        self.names: dict[str, Any] = {}

    def _segment(self, size: int) -> Segment:
        """Make memory that is filled here and then mapped by the children only."""
        self.segments.append(Segment(size))
        return self.segments[-1]

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is OrderedDict:
            return NotImplemented  # a module has a dozen
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__" and is_found(obj):
            self.names[obj.__qualname__] = obj
        for reduce in _reducers:
            reduced = reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        if type(obj) is Tensor and obj.nbytes >= _LARGE and _plain(obj):
            flat = obj.contiguous()
            segment = self._segment(flat.nbytes)
            segment.tensor(flat.dtype, flat.shape).copy_(flat)
            segment.unmap()
            return _tensor, (segment.handle, flat.dtype, tuple(flat.shape))
        if type(obj) is np.ndarray and obj.nbytes >= _LARGE and obj.dtype.kind in "biufc":
            array = np.ascontiguousarray(obj)
            segment = self._segment(array.nbytes)
            np.frombuffer(segment.memory, array.dtype, array.size)[:] = array.reshape(-1)
            segment.unmap()
            return _array, (segment.handle, array.dtype.str, array.shape)
        way = _way_to(obj)
        if way is not None:
            return _reach, way
        if isinstance(obj, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            raise UsageError(
                "what torch.jit has compiled cannot be sent to the replicas: use the module as it "
                "was before script or trace, or compile it in a function given to strategy.run, "
                "which makes one on each replica."
            )
        if _is_parametrized(obj):
            return parametrized, _parts(obj), super(type(obj), obj).__getstate__()
        return super().reducer_override(obj)


def is_found(obj: type | FunctionType) -> bool:
    """Whether plain pickle would find an object: not the class of a cell that has run again."""
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _way_to(obj: Any) -> tuple[str, ...] | None:
    """Return a module and the attributes that lead to an object which can only be sent by name.

    `torch.backends.cudnn` and `torch.ops` are objects put in a module's place; `torch.ops.aten`
    and the operators below it are made when they are first used.
    """
    if isinstance(obj, OpOverload):
        return ("torch.ops", *obj._schema.name.split("::"), obj._overloadname)
    if isinstance(obj, OpOverloadPacket):
        return ("torch.ops", *obj._qualified_op_name.split("::"))
    if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
        module, _, last = obj.__name__.rpartition(".")
        if sys.modules.get(obj.__name__) is obj:
            return (obj.__name__,)
        if getattr(sys.modules.get(module), last, None) is obj:
            return (module, last)
    return None


def _reach(module: str, *attributes: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in attributes:
        found = getattr(found, name)
    return found


def _is_parametrized(obj: Any) -> bool:
    """Whether torch's parametrize has replaced the module's class by one that refuses pickling."""
    if not isinstance(obj, nn.Module):
        return False
    refusal = vars(type(obj)).get("__getstate__")
    return getattr(refusal, "__module__", None) == parametrize.__name__


def _parts(module: Any) -> tuple[type[nn.Module], list[str]]:
    """Return a parametrized module's own class, and the names of the computed tensors."""
    return type(module).__bases__[0], list(module.parametrizations)


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


def _is_bytes_alone(tensor: Tensor) -> bool:
    """Whether a tensor is no more than type, shape and contiguous bytes."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return _plain(tensor) and tensor.is_contiguous() and not lazy and not vars(tensor)


def _unsigned(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(dtype)


def _copied(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).view(shape)


def _tensor(handle: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(_private(handle), dtype=dtype, count=math.prod(shape)).view(shape)


def _array(handle: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    return np.frombuffer(_private(handle), kind, math.prod(shape)).reshape(shape)


def _private(handle: str) -> mmap.mmap:
    """Map a segment; pages are copied where this child writes."""
    path, _, size = handle.rpartition(":")
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), int(size), access=mmap.ACCESS_COPY)


def dumps(obj: Any) -> tuple[bytes, list[Segment]]:
    """Return the bytes, and the segments that must exist until every child has read them."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(obj)
        pickler.dump(pickler.names)
    except (StratagemError, torch.OutOfMemoryError):
        raise
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"what is to run on the replicas cannot be sent to them: {error}. Keep open files, "
            "locks and connections out of the function, its arguments, the model and the data; "
            "make them inside the function."
        ) from error
    return file.getvalue(), pickler.segments


def dumps_answer(obj: Any) -> bytes:
    """Return the bytes of a child's answer, without segments: no process could tell when to free
    them."""
    file = io.BytesIO()
    _AnswerPickler(file).dump(obj)
    return file.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)


def loads_call(data: bytes) -> Any:
    """In a child: load a call, and put the classes and functions of `__main__` under their names.

    Pickle needs the names in the child's own children: a DataLoader worker that cannot send a batch
    would block all replicas.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    call = unpickler.load()
    for name, thing in unpickler.load().items():
        thing.__qualname__ = name  # cloudpickle drops the name of the outer class
        if "." not in name:
            setattr(sys.modules["__main__"], name, thing)
    return call


class _Placeholder:
    """Replaces every object that a pickle would make."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> _Placeholder:
        return self

    __setstate__ = append = extend = add = __setitem__ = __call__


#: functions of pickles that import what their arguments name
_IMPORTING = {("cloudpickle.cloudpickle", "subimport"), (__name__, "_reach")}


class _Importer(pickle.Unpickler):
    """Imports the modules that a pickle names, and makes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _IMPORTING:
            return super().find_class(module, name)
        if module != "__main__":
            importlib.import_module(module)
        return _Placeholder


def preload(call: bytes) -> None:
    """In a child: import what a call needs, before the call comes."""
    try:
        _Importer(io.BytesIO(call)).load()
    except (Exception, SystemExit) as problem:  # the call itself will raise it, if it comes
        log.debug("what a call needs is imported when it comes: %r", problem)
