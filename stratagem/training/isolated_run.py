"""An isolated run: a model or a training step runs without side effects or random numbers.

A dispatch mode sees every operation of torch. Each tensor that an operation writes to is copied
first and restored at the end: weights, buffers, metrics, an optimizer's state, wherever they are
kept. Random numbers are replaced by their expected value, which is the same for any rows: dropout
drops nothing, and noise is zero. Attributes and the states of all generators are restored, too.
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

#: an argument of attention and of its backward
_DROPOUT = "dropout_p"
#: in the names of operations that draw a mask
_MASKS = "dropout", "bernoulli"
#: runs in place of an operation, given the operation and its arguments
Still = Callable[[Any, dict[str, Any]], Any]


@contextmanager
def dry_run(*owners: Any, disturbed: bool = False) -> Iterator[WriteJournal]:
    """Undo at the end whatever the block writes, attributes of the `owners` included.

    Copy results inside of the block, since the end may overwrite them. `disturbed`: every result is
    off by one rounding error, which shows how far rounding can move the outcome.
    """
    journal = WriteJournal(disturbed)
    attributes = [_Attributes(vars(owner)) for owner in owners if hasattr(owner, "__dict__")]
    numbers = random.getstate(), np.random.get_state()
    devices = gpu_in_use()
    # importing the compiler takes a second: only where it was imported already
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None
    cudnn, torch.backends.cudnn.enabled = (
        torch.backends.cudnn.enabled,
        False,
    )  # its RNNs hide dropout
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
    """Copies what operations write to before they do, and makes random ones still."""

    def __init__(self, disturbed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._disturbed = disturbed
        #: the largest relative rounding error among the dtypes of all results
        self.epsilon = 0.0
        #: whether an operation would have drawn random numbers
        self.draws = False
        #: whether they were more than masks of a dropout
        self.noise = False
        self._before: dict[Any, tuple[Tensor, Tensor]] = {}
        self._generators: dict[torch.Generator, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled meanwhile, and importing the compiler takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _described(func)
        if known.plain:
            result = func(*args, **(kwargs or {}))
        else:
            given = dict(zip(known.names, args, strict=False)) | (kwargs or {})
            result = self._run_guarded(func, known, given, args, kwargs or {})
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.epsilon = max(self.epsilon, _epsilon(each.dtype))
                if self._disturbed and known.fresh:
                    _disturb(each)
        return result

    def _run_guarded(self, func: Any, known: _Operation, given: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that writes or draws."""
        for name in known.written:
            for tensor in pytree.tree_leaves(given.get(name)):
                self._save(tensor)
        generator = given.get("generator")
        if generator is not None and generator not in self._generators:
            self._generators[generator] = generator.get_state()
        self.draws |= known.random or bool(given.get(_DROPOUT))
        self.noise |= known.random and not any(mask in func._schema.name for mask in _MASKS)
        if known.still is not None:
            return known.still(func, given)
        if given.get(_DROPOUT):
            return func(**given | {_DROPOUT: 0.0})
        return func(*args, **kwargs)

    def _save(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = (*place, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._before:
            self._before[key] = tensor.detach(), tensor.detach().clone()

    def was_written(self, tensor: Tensor) -> bool:
        """Whether an operation wrote to a part of `tensor`, be it the same values."""
        start, place = tensor.storage_offset(), tensor.untyped_storage().data_ptr()
        return any(
            key[0] == place and start <= key[1] < start + tensor.numel() for key in self._before
        )

    @torch.no_grad()
    def undo(self) -> None:
        """Restore what was written to, the last first: one tensor may be a part of another."""
        for tensor, before in reversed(self._before.values()):
            tensor.copy_(before)
        for generator, state in self._generators.items():
            generator.set_state(state)


class _Operation(NamedTuple):
    """What an operation's schema and tags say of it."""

    #: the names of its arguments
    names: list[str]
    #: arguments that it writes to; the schemas of batch norms leave theirs out
    written: list[str]
    #: whether it always draws random numbers; attention does so only with dropout
    random: bool
    still: Still | None
    #: whether it neither writes nor draws
    plain: bool
    #: whether its results are no views of its arguments
    fresh: bool


@cache
def _described(func: Any) -> _Operation:
    schema = func._schema
    names = [argument.name for argument in schema.arguments]
    written = [
        each.name
        for each in schema.arguments
        if (each.alias_info is not None and each.alias_info.is_write)
        or each.name.startswith("running_")
    ]
    random = torch.Tag.nondeterministic_seeded in func.tags and _DROPOUT not in names
    still = _still(schema.name.removeprefix("aten::")) if random else None
    plain = not written and not random and _DROPOUT not in names
    fresh = all(r.alias_info is None for r in schema.returns)
    return _Operation(names, written, random, still, plain, fresh)


@cache
def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _disturb(result: Tensor) -> None:
    """Move each value by one rounding error. Whole numbers stay: they are exact, and masks are made
    of them."""
    if result.is_floating_point() and result.layout == torch.strided:
        up = (torch.rand(result.shape, device=result.device) < 0.5).to(result.dtype) * 2 - 1
        off = 1 + up * torch.finfo(result.dtype).eps
        result.mul_(torch.where(result == result.round(), torch.ones_like(off), off))


# --- random numbers -------------------------------------------------------------------------------


def _filled(func: Any, given: dict[str, Any], expected: Any) -> Any:
    """Run the operation, then write the expected value into every place of its result."""
    made = func(**given)
    if not made.is_floating_point() and not isinstance(expected, Tensor):
        expected = math.ceil(expected)
    return made.copy_(torch.as_tensor(expected, device=made.device).expand_as(made))


def _changed(**options: Any) -> Still:
    return lambda func, given: func(**given | options)


def _middle(given: dict[str, Any]) -> Any:
    """The middle of a range of whole numbers."""
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    return low if high is None else (low + high) // 2


def _most_likely(func: Any, given: dict[str, Any]) -> Any:
    weights, count = given["self"], given["num_samples"]
    if count <= weights.shape[-1]:
        return weights.topk(count).indices
    return weights.argmax(-1, keepdim=True).repeat_interleave(count, -1)


#: by operation, without `_` or `_like` at the end: the expected value of what it draws
_EXPECTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "normal": lambda given: given.get("mean", 0.0),
    "uniform": lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2,
    "exponential": lambda given: 1.0 / given.get("lambd", 1.0),
    "geometric": lambda given: 1.0,
    "cauchy": lambda given: given.get("median", 0.0),
    "log_normal": lambda given: math.exp(given.get("mean", 1.0)),
    "bernoulli": lambda given: given.get("p", given["self"]),
    "bernoulli_": lambda given: given.get("p", 0.5),
    "rand": lambda given: 0.5,
    "randn": lambda given: 0.0,
    "randint": _middle,
    "random": _middle,
    "poisson": lambda given: given["self"],
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
    "binomial": lambda given: given["count"] * given["prob"],
}
#: by operation: what runs instead, where filling in one value is not enough
_STILL: dict[str, Still] = {
    # a permutation of some rows is no part of that of more rows, so that it shows if they are mixed
    "randperm": lambda func, given: func(**given).sort(descending=True).values,
    "multinomial": _most_likely,
    "native_dropout": _changed(p=0.0),
    "_fused_dropout": _changed(p=1.0),
    "rrelu_with_noise": _changed(training=False),
    "rrelu_with_noise_": _changed(training=False),
}


def _still(name: str) -> Still | None:
    """What runs in place of a random operation."""
    expected = _EXPECTED.get(name) or _EXPECTED.get(name.removesuffix("_like").removesuffix("_"))
    if expected is None:
        return _STILL.get(name)
    return lambda func, given: _filled(func, given, expected(given))


# --- attributes -----------------------------------------------------------------------------------


class _Attributes:
    """The attributes of one object, and the contents of those that are lists, dicts and sets."""

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


#: an object, the name of a method, and what is called instead
Replacement = tuple[Any, str, Callable[..., Any]]


@contextmanager
def replaced(methods: list[Replacement]) -> Iterator[None]:
    """Replace methods of single objects within the block."""
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
    """Have batch norms take each row by itself, with their running statistics.

    In a training they are exact if they are synchronised, and meant to see only a replica's own
    rows if not; a check of rows must not complain about either.
    """
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
