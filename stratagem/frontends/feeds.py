"""Data of any kind as global batches, of which a replica draws its share.

    arrays, tensors,
    lists of numbers     every replica indexes its own rows; shuffled from one seed
    map-style datasets   through a DataLoader whose sampler deals out shares
    DataLoaders          the same, keeping their sampler, collate function and workers
    streams, generators  the chief reads, everybody keeps its share
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from stratagem.data.loader import check_sampler, shares_of, stream
from stratagem.data.shard import count_rows, rows, rows_of, share
from stratagem.errors import UsageError
from stratagem.frontends.lists import from_lists, is_numbers
from stratagem.strategies.replica import Replica
from stratagem.strategies.widths import Widths
from stratagem.wire.tree import SIGNED, broadcast_tree

#: arrays up to this size are kept on the GPU for the whole fit
_RESIDENT_BYTES = 1 << 30


@dataclass(slots=True)
class Portion:
    """A replica's share of one global batch; `borrowed` rows stand in for an empty share."""

    x: Any
    y: Any
    weight: Tensor | None
    examples: int
    total: int


class Feed(Protocol):
    """A source of global batches."""

    @property
    def steps(self) -> int | None:
        """Batches an epoch, None if unknown."""

    @property
    def once(self) -> bool:
        """Whether it goes on where it stopped instead of starting anew (a generator)."""

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        """This replica's shares, in order. Collective where the source needs it."""

    def without_source(self) -> Feed:
        """What a follower needs of it."""

    def agree(self, replica: Replica) -> None:
        """Settle with the other processes what each drew by itself. Collective."""

    def dice(self) -> int | None:
        """What this process drew by itself and others must know."""

    def take_dice(self, drawn: int | None) -> None:
        """Take over what the chief drew."""

    @property
    def dataset(self) -> Any:
        """That every replica reads by itself; None if there is none."""

    def tensors(self) -> list[Tensor]:
        """Of which every replica has a copy."""


@dataclass
class ArrayFeed:
    """Arrays or tensors, indexed in place."""

    x: Any
    y: Any
    weight: Tensor | None
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    once: ClassVar[bool] = False
    #: the epoch whose order was drawn last, and that order
    _drawn: tuple[int, Tensor | None] | None = None

    @property
    def length(self) -> int:
        return count_rows(self.x)

    @property
    def steps(self) -> int:
        return -(-self.length // self.batch_size)

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        data, order, length = [self.x, self.y, self.weight], self._order(epoch), self.length
        if replica.device.type == "cuda" and sum(map(_nbytes, data)) <= _RESIDENT_BYTES:
            data, order = _map(lambda t: t.to(replica.device), [data, order])
        for begin in range(0, length, self.batch_size):
            total = min(self.batch_size, length - begin)
            start, end = share(total, replica.count, replica.index)
            window = slice(begin + start, begin + end) if end > start else slice(begin, begin + 1)
            chosen: Any = window if order is None else order[window]
            x, y, weight = (_rows_at(part, chosen) for part in data)
            yield Portion(x, y, weight, end - start, total)

    def part(self, epoch: int, batch: int, part: int, parts: int) -> Portion:
        """One of the parts of one batch, found by its number."""
        begin = batch * self.batch_size
        total = min(self.batch_size, self.length - begin)
        start, end = share(total, parts, part)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._order(epoch))
        order, window = self._drawn[1], slice(begin + start, begin + end)
        chosen: Any = window if order is None else order[window]
        x, y, weight = (_rows_at(each, chosen) for each in (self.x, self.y, self.weight))
        return Portion(x, y, weight, end - start, total)

    def agree(self, replica: Replica) -> None:
        self.seed = broadcast_tree(replica.collective, self.seed)

    def dice(self) -> int | None:
        return self.seed

    def take_dice(self, drawn: int | None) -> None:
        assert drawn is not None
        self.seed = drawn

    def _order(self, epoch: int) -> Tensor | None:
        """The same permutation whatever the number of replicas."""
        if not self.shuffle:
            return None
        dice = torch.Generator().manual_seed((self.seed + 7919 * epoch) % 2**63)
        return torch.randperm(self.length, generator=dice)

    def without_source(self) -> Feed:
        return self

    @property
    def dataset(self) -> Any:
        return None

    def tensors(self) -> list[Tensor]:
        return _leaves([self.x, self.y, self.weight])


@dataclass
class LoaderFeed:
    """A DataLoader; its own sampler decides the order."""

    loader: DataLoader[Any] | None
    steps: int | None
    once: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._widths = Widths(self.loader)

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        assert self.loader is not None
        sizes: list[tuple[int, int]] = []
        shares = shares_of(
            self.loader, replica.collective, lambda n, m: sizes.append((n, m)),
            ordering=replica.ordering,
        )  # fmt: skip
        for batch in shares:
            size = sizes.pop()
            self._widths.look(self.loader, batch, size[0], replica)
            yield portion_of(batch, size)

    def batches(self) -> Iterator[Any]:
        """Whole batches, as the chief reads them."""
        assert self.loader is not None
        return iter(self.loader)

    def without_source(self) -> Feed:
        assert self.loader is not None
        if isinstance(self.loader.dataset, IterableDataset):
            return StreamFeed(None, self.steps)
        return self

    @property
    def dataset(self) -> Any:
        found = None if self.loader is None else self.loader.dataset
        return None if isinstance(found, IterableDataset) else found

    def tensors(self) -> list[Tensor]:
        inner = self.dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        return list(inner.tensors) if isinstance(inner, TensorDataset) else []

    def agree(self, replica: Replica) -> None:
        """Only the chief draws: there is nothing to settle."""

    def dice(self) -> int | None:
        return None

    def take_dice(self, drawn: int | None) -> None:
        return None


@dataclass
class StreamFeed:
    """Whole batches from an iterable that only the chief reads."""

    source: Iterable[Any] | None
    steps: int | None
    once: bool = False

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        for batch in stream(_tensors(self.source), replica.collective, replica.ordering):
            total = rows_of(batch) if replica.count > 1 else count_rows(batch)
            start, end = share(total, replica.count, replica.index)
            part = rows(batch, start, end) if end > start else rows(batch, 0, 1)
            yield portion_of(part, (end - start, total))

    def batches(self) -> Iterator[Any]:
        """Whole batches, as the chief reads them."""
        return _tensors(self.source)

    def without_source(self) -> Feed:
        return replace(self, source=None)

    @property
    def dataset(self) -> Any:
        return None

    def tensors(self) -> list[Tensor]:
        return []

    def agree(self, replica: Replica) -> None:
        """Only the chief reads: there is nothing to settle."""

    def dice(self) -> int | None:
        return None

    def take_dice(self, drawn: int | None) -> None:
        return None


def check_enough(source: Feed, drawn: int, asked: int | None, epoch: int) -> None:
    """An epoch without data, or a generator without enough of it, is no epoch."""
    if drawn and not (source.once and asked is not None and drawn < asked):
        return
    got = f"{drawn or 'none'} of its {asked} batches" if asked is not None else "no batch"
    raise UsageError(
        f"the data ran dry: epoch {epoch + 1} got {got}; give something that can "
        "be iterated again (arrays, a DataLoader, a list of batches), or a generator of "
        "epochs * steps_per_epoch batches together with steps_per_epoch."
    )


def _tensors(source: Iterable[Any] | None) -> Iterator[Any]:
    for batch in source or ():
        apart = type(batch) in (list, tuple)
        yield _map(_tensor, list(map(from_lists, batch)) if apart else from_lists(batch))


def portion_of(batch: Any, size: tuple[int, int]) -> Portion:
    """A batch as a portion; `size` is how many examples it has, and how many all parts have."""
    return Portion(*unpack(batch), *size)


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """(x), (x, y) or (x, y, sample weight)."""
    if isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        if len(batch) in (1, 2, 3):
            x, y, weight = (*batch, None, None)[:3]
            return x, y, weight
        raise UsageError(
            f"a batch of {len(batch)} parts is not understood; batches are x, (x, y) or "
            "(x, y, sample_weight), where x may itself be a tuple or a dict of tensors."
        )
    return batch, None, None


def _steps(loader: DataLoader[Any]) -> int | None:
    """How many batches it has, if that is known before they come."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:  # that is how a sampler without a length says so
        return None


def feed(
    x: Any, y: Any = None, weight: Any = None, *, batch_size: int | None, shuffle: bool, seed: int
) -> Feed:
    """The feed for whatever the user gave."""
    if batch_size is not None and not isinstance(batch_size, int | np.integer):
        raise UsageError(f"batch_size is {batch_size!r}; it must be a whole number.")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be 1 or more.")
    if isinstance(x, DataLoader):
        _alone(y, weight, "a DataLoader")
        _as_they_are(batch_size, "a DataLoader's batches are")
        check_sampler(x)
        return LoaderFeed(x, _steps(x))
    if isinstance(x, IterableDataset):
        _alone(y, weight, "a dataset")
        return LoaderFeed(DataLoader(x, batch_size=batch_size or 32), None)
    if _is_dataset(x):
        _alone(y, weight, "a dataset")
        return _dataset(x, batch_size or 32, shuffle, seed)
    if is_arrays(x) and not _is_batches(x, y):
        x, y, weight = (from_lists(part) for part in (x, y, weight))
        return _arrays(x, y, weight, batch_size or 32, shuffle, seed)
    if isinstance(x, Iterable):
        _alone(y, weight, "an iterable")
        _as_they_are(batch_size, "the batches of an iterable are")
        return StreamFeed(x, len(x) if isinstance(x, Sized) else None, isinstance(x, Iterator))
    raise UsageError(
        f"{type(x).__name__} is not data that can be fed; give arrays, tensors, a dataset, a "
        "DataLoader, or an iterable of batches."
    )


def _dataset(data: Any, batch_size: int, shuffle: bool, seed: int) -> Feed:
    dice = torch.Generator().manual_seed(seed % 2**63)
    loader = DataLoader(data, batch_size=batch_size, shuffle=shuffle, generator=dice)
    return LoaderFeed(loader, len(loader))


def _arrays(x: Any, y: Any, weight: Any, batch_size: int, shuffle: bool, seed: int) -> Feed:
    x, y, weight = (_map(_tensor, part) for part in (x, y, weight))
    lengths = [len(t) for t in _leaves([x, y, weight])]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"the arrays have different lengths ({', '.join(map(str, lengths))}); x, y and "
            "sample_weight need one row for each example."
        )
    if not lengths or lengths[0] == 0:
        raise UsageError("the data is empty: there is no example in it.")
    return ArrayFeed(x, y, weight, batch_size, shuffle, seed)


def is_arrays(x: Any) -> bool:
    """Whether it is one array, or several as inputs side by side."""
    if isinstance(x, Tensor | np.ndarray) or is_numbers(x):
        return True
    if isinstance(x, dict):
        return bool(x) and all(map(is_arrays, x.values()))
    return isinstance(x, list | tuple) and bool(x) and all(map(is_arrays, x))


def _is_batches(x: Any, y: Any) -> bool:
    """A list of tuples and no y: batches one after the other, not several inputs."""
    if y is not None or not isinstance(x, list):
        return False
    if is_numbers(x) and not (isinstance(x[0], tuple) and isinstance(x[0][0], list | tuple)):
        return False  # rows of one array
    return all(isinstance(item, list | tuple) for item in x)


def _is_dataset(x: Any) -> bool:
    if isinstance(x, Dataset):
        return True
    ours = isinstance(x, Tensor | np.ndarray | list | tuple | dict | str)
    return hasattr(x, "__getitem__") and hasattr(x, "__len__") and not ours


def in_batches(x: Any) -> bool:
    """Whether it comes in batches already: a DataLoader, or an iterable of batches."""
    if isinstance(x, DataLoader):
        return True
    arrays = is_arrays(x) and not _is_batches(x, None)
    return isinstance(x, Iterable) and not _is_dataset(x) and not arrays


def _alone(y: Any, weight: Any, what: str) -> None:
    if y is not None or weight is not None:
        raise UsageError(
            f"y and sample_weight come from {what} itself when x is one; its batches are (x, y) "
            "or (x, y, sample_weight)."
        )


def _as_they_are(batch_size: int | None, what: str) -> None:
    if batch_size is not None:
        raise UsageError(
            f"batch_size={batch_size} cannot be followed: {what} taken as they come; leave it out."
        )


def _tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if not value.flags.writeable:
        value = value.copy()
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _map(function: Any, tree: Any) -> Any:
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


def _rows_at(tree: Any, chosen: slice | Tensor) -> Any:
    if tree is None:
        return None
    if type(tree) is Tensor:  # the common case, on the hot path
        if type(chosen) is slice:
            return tree[chosen]
        if tree.dtype in SIGNED:
            return tree.view(SIGNED[tree.dtype]).index_select(0, chosen).view(tree.dtype)
        return tree.index_select(0, chosen)
    return _map(lambda leaf: _rows_at(leaf, chosen), tree)


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in _leaves(part)]
    return []


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in _leaves(tree))
