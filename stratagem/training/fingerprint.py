"""Fingerprints of a call's arguments, which workers compare before they train together.

Under a launcher every worker builds the model and loads the data itself, and takes its share from
its own copy. Copies that differ (a split without a seed, a part of the data for each worker) would
train on something that no single device sees. So workers exchange a fingerprint of the arguments:
names, shapes and numbers of rows, and the values of a few rows.

Left out is what the chief alone decides: weights, a stream's batches, a loader's order.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset, TensorDataset

from stratagem.compat.torch_names import norms as norms_of
from stratagem.data.loader import is_stream
from stratagem.errors import UsageError
from stratagem.state.optimizer_state import params_of
from stratagem.training.replica import Replica, current_replica
from stratagem.wire.collective import Collective
from stratagem.wire.tree import gather_tree

#: by the name of a property: its text, or a tensor of a few values; None where it is not known
Look = dict[str, str | Tensor | None]

#: the name of the list of a module's tensors, a line each
_TENSORS = "tensors of the model"
#: part of the names of Keras' variables; a name that Keras has counted up
_OF_KERAS, _COUNTED = "_torch_params.", re.compile(r"([A-Za-z]\w*?)(?:_(\d+))?(?=[/.]|$)")
_ROWS = 8
_VALUES = 32  # of a row
_READS = 4  # of an item: so many tell random augmentation from a fixed value


def check(replica: Replica, call: str, look: Look) -> None:
    """Refuse a call in which replicas have different arguments. Collective."""
    compare(call, gather_tree(replica.collective, [replica.name, call, look]))


def tell(call: str, look: Look | None) -> list[Any]:
    """Gather every replica's look; None for replicas that run no script. Collective."""
    replica = current_replica()
    looks = gather_tree(replica.collective, [replica.name, call, look])
    return [each for each in looks if each[2] is not None]


def compare(call: str, looks: list[Any]) -> None:
    """Raise if a replica's arguments differ from those of the first one."""
    (first, verb, ours), *others = looks
    for name, other, theirs in others:
        if other != verb:
            raise _unlike(f"{name} calls {other} while {first} calls {verb}")
        for what, mine in ours.items():
            if what == _TENSORS and mine != theirs.get(what):
                raise UsageError(f"{name} calls {call} with {_other_model(mine, theirs, first)}")
            if not _alike(mine, theirs.get(what)):
                raise _unlike(f"{name} calls {call} with " + _difference(what, mine, theirs, first))


def _other_model(mine: Any, theirs: Look, first: str) -> str:
    """Return the first tensor in which two models differ, and what to do."""
    lines = str(mine).split("\n"), str(theirs.get(_TENSORS)).split("\n")
    ours, others = next(pair for pair in zip_longest(*lines, fillvalue="none") if len({*pair}) > 1)
    return (
        f"another module than {first}: its first other tensor is {others}, not {ours}. Each "
        "builds the model by itself: give all of them the same sizes and the same frozen parts."
    )


def _difference(what: str, mine: Any, theirs: Look, first: str) -> str:
    other = theirs.get(what)
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        return f"other values in {what} than {first}"
    return f"another {what} than {first}: {other or 'none'}, not {mine}"


def _unlike(what: str) -> UsageError:
    return UsageError(
        f"{what}. Each runs this code by itself and takes its share from its own copy, so give all "
        "of them the same: seed what is drawn at random (random_split, randn) alike, and leave it "
        "to stratagem to deal out the rows."
    )


def _alike(mine: Any, theirs: Any) -> bool:
    if mine is None or theirs is None:
        return True  # not known on one of them
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return bool(type(mine) is type(theirs) and mine == theirs)
    if mine.shape != theirs.shape:
        return False
    # values computed on other machines may differ in the last digits
    mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
    return torch.allclose(mine, theirs, rtol=1e-2, atol=1e-5 * float(mine.abs().mean()))


_DECIDE = (
    "What a loop decides by its loss (a schedule, an early stop, a step that is left out) has to "
    "be decided alike by all: strategy.mean(loss) is the loss of the whole batch."
)
_ONE_OPTIMIZER = (
    "With sync= weights meet at the step of the prepared optimizer, which does not "
    "have them: give one optimizer all that is trained, in groups of parameters, and prepare "
    "that; or leave sync out."
)


def check_trained(replica: Replica, model: nn.Module, optimizer: Optimizer, meets: bool) -> None:
    """Refuse to continue if replicas have different weights or settings. Collective.

    `meets`: whether weights meet, and gradients do not.
    """
    trained = {
        name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()
    }
    settings = of_optimizer(optimizer, settings=True)
    mine = [replica.name, list(settings.items()), _norms(list(trained.values()))]
    if _same_bits(replica.collective, mine[1:]):
        return
    (first, ours, norms), *others = gather_tree(replica.collective, mine)
    for name, theirs, their_norms in others:
        found = [
            f"{what} is {other} there and {value} on {first}"
            for (what, value), (_, other) in zip(ours, theirs, strict=True)
            if value != other
        ]
        rows = zip(trained, norms, their_norms, strict=True)
        apart = [at for at, a, b in rows if not _about(a, b)]
        found += [f"parameter {at!r} has other values" for at in apart]
        if found:
            more = f", and {len(found) - 2} more" if len(found) > 2 else ""
            own = set(params_of(optimizer))
            left = meets and bool(apart) and own.isdisjoint(trained[at] for at in apart)
            raise UsageError(
                f"{name} has come apart from {first}: {'; '.join(found[:2])}{more}. "
                f"{_ONE_OPTIMIZER if left else _DECIDE}"
            )


def _same_bits(collective: Collective, look: Any) -> bool:
    """Whether a value is the same to the bit on all replicas, as on one machine. Collective.

    A few bytes travel, a tenth of the time of `gather_tree`."""
    made = hashlib.blake2b(repr(look).encode(), digest_size=16).digest()
    mine = torch.frombuffer(bytearray(made), dtype=torch.uint8)
    return all(torch.equal(each, mine) for each in collective.gather_bytes(mine))


@torch.no_grad()
def _norms(params: list[nn.Parameter]) -> list[list[float]]:
    """Return two norms of each parameter; a change of one value shows in at least one."""
    tensors = [p.detach() for p in params]
    found = [torch.stack(norms_of(tensors, order)).double() for order in (1, 2)]
    norms: list[list[float]] = torch.stack(found, 1).tolist()
    return norms


def _about(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether norms are the same but for rounding, which differs between machines."""
    return all(
        math.isclose(a, b, rel_tol=1e-5) or (a != a and b != b)
        for a, b in zip(mine, theirs, strict=True)
    )


def of_module(module: nn.Module) -> Look:
    """The names, shapes and types of a module's tensors, and the classes of its parts."""
    state = [*module.named_parameters(), *module.named_buffers()]
    names = _counted_from_0([name for name, _ in state])
    lines = [
        f"{name} ({'lazy' if is_lazy(t) else list(t.shape)}, "
        f"{str(t.dtype).removeprefix('torch.')}, {'trained' if t.requires_grad else 'not trained'})"
        for name, (_, t) in zip(names, state, strict=True)
    ]
    kinds = [type(part).__name__ for part in module.modules()]
    text = f"{type(module).__name__} of layers {_short(kinds)}"
    return {_TENSORS: "\n".join(lines), "module": text}


def _counted_from_0(names: Sequence[str]) -> list[str]:
    """Return Keras' names with their counts from 0 on: in a notebook dense_3 is another process'
    dense. Layers stay in the order of their counts."""
    counts: dict[str, set[int]] = {}
    for base, number in _COUNTED.findall("/".join(name for name in names if _OF_KERAS in name)):
        counts.setdefault(base, set()).add(int(number or 0))

    def renamed(found: re.Match[str]) -> str:
        place = sorted(counts[found[1]]).index(int(found[2] or 0))
        return f"{found[1]}_{place}" if place else found[1]

    return [_COUNTED.sub(renamed, name) if _OF_KERAS in name else name for name in names]


def of_optimizer(optimizer: Optimizer, *, settings: bool) -> Look:
    """An optimizer's class and sizes of its groups; its settings unless the chief sends its own."""
    groups = [len(group["params"]) for group in optimizer.param_groups]
    look: Look = {"optimizer": f"{type(optimizer).__name__} of {groups} parameters"}
    for name in optimizer.param_groups[0] if settings else ():
        values = [_plain(group.get(name)) for group in optimizer.param_groups]
        if name != "params" and _is_plain(values):
            look[f"{name} of the optimizer"] = str(values if len(values) > 1 else values[0])
    return look


def of_loader(loader: Any, label: str) -> Look:
    """The fingerprint of a loader's dataset; the chief's loader alone decides the batches."""
    if not isinstance(loader, DataLoader):
        return {f"kind of {label}": "none" if loader is None else type(loader).__name__}
    if is_stream(loader):
        return of_stream(label)
    return of_dataset(loader.dataset, label, read=loader.num_workers == 0)


def of_stream(label: str) -> Look:
    """The fingerprint of a stream, which the chief alone reads."""
    return {f"kind of {label}": "a stream"}


def of_dataset(dataset: Any, label: str, *, read: bool) -> Look:
    """The fingerprint of a dataset. `read`: whether items may be read in this process; loaders
    with workers read them elsewhere."""
    look: Look = {f"kind of {label}": "a dataset", f"number of rows in {label}": _length(dataset)}
    inner, depth = dataset, 0
    while isinstance(inner, Subset):
        indices = list(_plain(inner.indices))
        look[f"subset for {label}{depth or ''}"] = f"{len(indices)} rows ({_short(indices)})"
        inner, depth = inner.dataset, depth + 1
    look[f"type of {label}"] = type(inner).__name__
    if isinstance(inner, TensorDataset):
        return look | of_arrays(list(inner.tensors), label)
    return look | {label: _items(dataset) if read else None}


def of_arrays(tree: Any, label: str) -> Look:
    """Shapes, and some values of some rows."""
    if isinstance(tree, Tensor):
        shape = f"{list(tree.shape)} of {str(tree.dtype).removeprefix('torch.')}"
        return {f"shape of {label}": shape, label: some_rows(tree)}
    parts: Any = ()
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    look: Look = {}
    for key, part in parts:
        look |= of_arrays(part, f"{label}[{key!r}]")
    return look


def some_rows(tensor: Tensor) -> Tensor | None:
    """A few values of a few rows; None where there are none to take."""
    if tensor.layout is not torch.strided or not tensor.numel() or not tensor.dim():
        return None
    chosen = _spread(len(tensor), _ROWS).to(tensor.device)
    return torch.stack([_some(row) for row in tensor.detach()[chosen]])


def _some(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat[_spread(len(flat), _VALUES).to(flat.device)].cpu().double()


def _spread(length: int, count: int) -> Tensor:
    """Return at most `count` evenly spaced indices, the first and the last among them."""
    if length <= count:
        return torch.arange(length)
    return torch.arange(count) * (length - 1) // (count - 1)


def _length(dataset: Any) -> str | None:
    try:
        return str(len(dataset))
    except TypeError:  # a dataset without a length
        return None


def _items(dataset: Any) -> Tensor | None:
    """Return numbers of three items; None if they cannot be read, or are augmented at random."""
    found = []
    try:
        places = sorted({0, len(dataset) // 2, len(dataset) - 1})
        for read in range(_READS):
            with _dice(read):
                found.append(torch.cat([_numbers(dataset[place]) for place in places]))
    except Exception:  # an item that cannot be read raises again when it is needed
        return None
    same = all(torch.equal(found[0].nan_to_num(), each.nan_to_num()) for each in found)
    return found[0] if same and len(found[0]) else None


def _numbers(item: Any) -> Tensor:
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "biufc":
        item = torch.as_tensor(np.asarray(item))
    if isinstance(item, Tensor):
        return _some(item)
    if isinstance(item, bool | int | float):
        return torch.tensor([float(item)], dtype=torch.float64)
    if isinstance(item, dict):
        item = list(item.values())
    parts = [_numbers(part) for part in item] if isinstance(item, list | tuple) else []
    return torch.cat([torch.empty(0, dtype=torch.float64), *parts])


@contextmanager
def _dice(seed: int) -> Iterator[None]:
    """Seed all generators in this block, and restore them at the end."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _is_plain(value: Any) -> bool:
    """Whether a value's text is the same in every process; an object's may be its address."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _short(value: Any) -> str:
    """Return a short digest of a value."""
    return "#" + hashlib.blake2b(repr(value).encode(), digest_size=4).hexdigest()
