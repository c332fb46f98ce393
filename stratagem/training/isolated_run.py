"""Run a model, or a step of it, without leaving a trace, and with its random layers still.

Every operation of torch passes through here while it runs. What it writes to is copied first and
put back at the end: weights, buffers, metrics, an optimizer's state, wherever they are kept. Random
numbers are replaced by what is expected of them, which is the same for any rows: dropout lets
everything through, and noise is zero. Attributes and the state of all generators are put back, too.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.compat.torch_names import BatchNorm, TorchDispatchMode, pytree
from stratagem.wire.device_kinds import gpu_in_use

#: an option of attention, also of its backward
_DROPOUT = "dropout_p"
#: what comes in the place of an operation, and the arguments that it was given
Still = Callable[[Any, dict[str, Any]], Any]


@contextmanager
def dry_run(*owners: Any, disturbed: bool = False) -> Iterator[WriteJournal]:
    """Whatever happens within leaves no trace; attributes are put back for the owners. Results
    are to be copied before it ends: operations in place write to them, too. `disturbed`: every
    result is off by a rounding, to see what rounding may do to the end."""
    journal = WriteJournal(disturbed)
    attributes = [_Attributes(vars(owner)) for owner in owners if hasattr(owner, "__dict__")]
    numbers = random.getstate(), np.random.get_state()
    devices = gpu_in_use()
    # importing the compiler takes a second: only where somebody has used it
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None
    cudnn, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False  # it drops by itself
    try:
        with torch.random.fork_rng(devices), eager or nullcontext(), journal:
            yield journal
    finally:
        torch.backends.cudnn.enabled = cudnn
        journal.undo()
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        for each in attributes:
            each.put_back()


class WriteJournal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operations write to, and keeps random ones still."""

    def __init__(self, disturbed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._disturbed = disturbed
        #: the relative rounding of the coarsest numbers that have been computed with
        self.epsilon = 0.0
        #: whether an operation would have drawn random numbers
        self.draws = False
        self._before: dict[Any, tuple[Tensor, Tensor]] = {}
        self._generators: dict[torch.Generator, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled meanwhile, and importing the compiler takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _known(func)
        if known.plain:
            result = func(*args, **(kwargs or {}))
        else:
            given = dict(zip(known.names, args, strict=False)) | (kwargs or {})
            result = self._with_care(func, known, given, args, kwargs or {})
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.epsilon = max(self.epsilon, _epsilon(each.dtype))
                if self._disturbed and known.fresh:
                    _disturb(each)
        return result

    def _with_care(self, func: Any, known: _Known, given: Any, args: Any, kwargs: Any) -> Any:
        """An operation that writes, or draws."""
        for name in known.written:
            for tensor in pytree.tree_leaves(given.get(name)):
                self._note(tensor)
        generator = given.get("generator")
        if generator is not None and generator not in self._generators:
            self._generators[generator] = generator.get_state()
        self.draws |= known.still is not None or bool(given.get(_DROPOUT))
        if known.still is not None:
            return known.still(func, given)
        if given.get(_DROPOUT):
            return func(**given | {_DROPOUT: 0.0})
        return func(*args, **kwargs)

    def _note(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = (*place, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._before:
            self._before[key] = tensor.detach(), tensor.detach().clone()

    def was_written(self, tensor: Tensor) -> bool:
        """Whether this was written to, or a part of it, be it with the same values."""
        start, place = tensor.storage_offset(), tensor.untyped_storage().data_ptr()
        return any(
            key[0] == place and start <= key[1] < start + tensor.numel() for key in self._before
        )

    @torch.no_grad()
    def undo(self) -> None:
        """Put back what was written to, the last first: one may be a part of another."""
        for tensor, before in reversed(self._before.values()):
            tensor.copy_(before)
        for generator, state in self._generators.items():
            generator.set_state(state)


class _Known(NamedTuple):
    """What an operation's schema says of it."""

    names: list[str]
    #: arguments that it writes to; batch norms do not say that they do
    written: list[str]
    still: Still | None
    #: whether it neither writes nor draws
    plain: bool
    #: whether its results are no views of its arguments
    fresh: bool


@cache
def _known(func: Any) -> _Known:
    schema = func._schema
    names = [argument.name for argument in schema.arguments]
    written = [
        each.name
        for each in schema.arguments
        if (each.alias_info is not None and each.alias_info.is_write)
        or each.name.startswith("running_")
    ]
    still = _STILL.get(schema.name.removeprefix("aten::"))
    plain = not written and still is None and not {"generator", _DROPOUT} & {*names}
    return _Known(names, written, still, plain, all(r.alias_info is None for r in schema.returns))


@cache
def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _disturb(result: Tensor) -> None:
    """Round it otherwise. Whole numbers stay: they are exact, and masks are made of them."""
    if result.is_floating_point() and result.layout == torch.strided:
        up = (torch.rand(result.shape, device=result.device) < 0.5).to(result.dtype) * 2 - 1
        off = 1 + up * torch.finfo(result.dtype).eps
        result.mul_(torch.where(result == result.round(), torch.ones_like(off), off))


# --- random numbers -------------------------------------------------------------------------------


def _filled(value: Callable[[dict[str, Any]], Any]) -> Still:
    """As the operation makes it, with this in every place."""

    def still(func: Any, given: dict[str, Any]) -> Any:
        made = func(**given)
        expected = value(given)
        if not made.is_floating_point() and not isinstance(expected, Tensor):
            expected = math.ceil(expected)
        return made.copy_(torch.as_tensor(expected, device=made.device).expand_as(made))

    return still


def _changed(**options: Any) -> Still:
    return lambda func, given: func(**given | options)


def _between(given: dict[str, Any]) -> Any:
    """Of whole numbers."""
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    return low if high is None else (low + high) // 2


def _chosen(func: Any, given: dict[str, Any]) -> Any:
    """The most likely ones."""
    weights, count = given["self"], given["num_samples"]
    if count <= weights.shape[-1]:
        return weights.topk(count).indices
    return weights.argmax(-1, keepdim=True).repeat_interleave(count, -1)


_BOTH: dict[str, Callable[[dict[str, Any]], Any]] = {
    "normal": lambda given: given.get("mean", 0.0),
    "uniform": lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2,
    "exponential": lambda given: 1.0 / given.get("lambd", 1.0),
    "geometric": lambda given: 1.0,
    "cauchy": lambda given: given.get("median", 0.0),
    "log_normal": lambda given: math.exp(given.get("mean", 1.0)),
}
#: by operation: what comes instead
_STILL: dict[str, Still] = {
    **{name: _filled(value) for name, value in _BOTH.items()},
    **{f"{name}_": _filled(value) for name, value in _BOTH.items()},
    "bernoulli": _filled(lambda given: given.get("p", given["self"])),
    "bernoulli_": _filled(lambda given: given.get("p", 0.5)),
    "random_": _filled(_between),
    "rand": _filled(lambda given: 0.5),
    "rand_like": _filled(lambda given: 0.5),
    "randn": _filled(lambda given: 0.0),
    "randn_like": _filled(lambda given: 0.0),
    "randint": _filled(_between),
    "randint_like": _filled(_between),
    "poisson": _filled(lambda given: given["self"]),
    "_standard_gamma": _filled(lambda given: given["self"]),
    "_sample_dirichlet": _filled(lambda g: g["self"] / g["self"].sum(-1, keepdim=True)),
    "binomial": _filled(lambda given: given["count"] * given["prob"]),
    # of some rows another one than of more rows, so that it shows if they are mixed
    "randperm": lambda func, given: func(**given).sort(descending=True).values,
    "multinomial": _chosen,
    "native_dropout": _changed(p=0.0),
    "_fused_dropout": _changed(p=1.0),
    "rrelu_with_noise": _changed(training=False),
    "rrelu_with_noise_": _changed(training=False),
}


# --- attributes -----------------------------------------------------------------------------------


class _Attributes:
    """Of one object, and what is in its own lists, dicts and sets."""

    def __init__(self, place: dict[str, Any]) -> None:
        self._place, self._before = place, dict(place)
        self._inside = [
            (value, type(value)(value))
            for value in place.values()
            if type(value) in (list, dict, set, deque)
        ]

    def put_back(self) -> None:
        for value, before in self._inside:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(before)
        self._place.clear()
        self._place.update(self._before)


#: an object, the name of a method, and what is to be called instead
Replacement = tuple[Any, str, Callable[..., Any]]


@contextmanager
def replaced(methods: list[Replacement]) -> Iterator[None]:
    """With these in place of the objects' own methods."""
    before = [obj.__dict__.get(name) for obj, name, _ in methods]
    for obj, name, function in methods:
        obj.__dict__[name] = function
    try:
        yield
    finally:
        for (obj, name, _), own in zip(methods, before, strict=True):
            if own is None:
                del obj.__dict__[name]
            else:
                obj.__dict__[name] = own


def norms_by_row(modules: Iterable[nn.Module]) -> list[Replacement]:
    """For a training: norms over a batch are exact if they are synchronised, and of a replica's own
    rows by intention if not; so here they take each row by itself, with what they have tracked."""
    return [
        (layer, "forward", partial(_by_row, layer))
        for layer in modules
        if isinstance(layer, BatchNorm)
    ]


def _by_row(layer: Any, x: Tensor) -> Tensor:
    mean, var = layer.running_mean, layer.running_var
    if mean is None or var is None:
        return x
    return nn.functional.batch_norm(x, mean, var, layer.weight, layer.bias, eps=layer.eps)
