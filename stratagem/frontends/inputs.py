"""Turns the data given to `fit`, `evaluate` or `predict` into a source (sources.py).

arrays, tensors, lists of numbers, or several of these per row     ArraySource
datasets with numbered rows, DataLoaders of them                   DatasetSource
other datasets and DataLoaders, generators, lists of batches       StreamSource
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratagem.data.loader import check_sampler, is_stream
from stratagem.data.shares import map_parts, tensors_in
from stratagem.errors import UsageError
from stratagem.frontends import asked
from stratagem.frontends.sources import ArraySource, DatasetSource, Source, StreamSource, unpack

_NUMBER = (bool, int, float, complex, np.generic)


class Kind(Enum):
    """The kinds of data that users give."""

    LOADER = auto()
    DATASET = auto()
    ARRAYS = auto()
    BATCHES = auto()


def kind_of(x: Any, y: Any = None) -> Kind:
    """Return what kind of data `x` is; a list is read differently if `y` is given."""
    if isinstance(x, DataLoader):
        return Kind.LOADER
    if _is_dataset(x):
        return Kind.DATASET
    if _is_arrays(x) and not _is_batches(x, y):
        return Kind.ARRAYS
    if isinstance(x, Iterable):
        return Kind.BATCHES
    raise UsageError(
        f"{type(x).__name__} is not data that can be fed; give arrays, tensors, a dataset, a "
        "DataLoader, or an iterable of batches."
    )


def source_of(
    x: Any,
    y: Any = None,
    weight: Any = None,
    *,
    batch_size: int | None,
    shuffle: bool = False,
    seed: int = 0,
) -> Source:
    """Return the user's data as a source."""
    asked.whole(1, batch_size=batch_size)
    kind = kind_of(x, y)
    if kind is Kind.ARRAYS:
        x, y, weight = (as_tensors(part) for part in (x, y, weight))
        _check_lengths([len(tensor) for tensor in tensors_in([x, y, weight])])
        return ArraySource(x, y, weight, batch_size or 32, shuffle, seed)
    if y is not None or weight is not None:
        what = {Kind.LOADER: "a DataLoader", Kind.DATASET: "a dataset"}.get(kind, "an iterable")
        raise UsageError(
            f"y and sample_weight come from {what} itself when x is one; its batches are (x, y) "
            "or (x, y, sample_weight)."
        )
    if batch_size is not None and kind is not Kind.DATASET:
        what = "a DataLoader's batches" if kind is Kind.LOADER else "the batches of an iterable"
        raise UsageError(
            f"batch_size={batch_size} cannot be followed: {what} are taken as they come; leave it "
            "out."
        )
    if kind is Kind.BATCHES:
        steps = len(x) if isinstance(x, Sized) else None
        return StreamSource(TensorBatches(x), steps, isinstance(x, Iterator))
    if kind is Kind.LOADER:
        check_sampler(x)
        return _loader(x)
    if isinstance(x, IterableDataset):
        return _loader(DataLoader(x, batch_size=batch_size or 32))
    dice = torch.Generator().manual_seed(seed % 2**63)
    return _loader(DataLoader(x, batch_size=batch_size or 32, shuffle=shuffle, generator=dice))


def to_train_on(
    data: tuple[Any, Any, Any],
    validation: Any,
    split: float | None,
    class_weight: Mapping[int, float] | Sequence[float] | None,
    *,
    batch_size: int | None,
    shuffle: bool,
    validation_batch_size: int | None,
) -> tuple[Source, Source | None]:
    """Return the sources to train on and to validate on; `data` is (x, y, sample weights)."""
    if split and validation is not None:
        raise UsageError("give validation_data or validation_split, not both.")
    if split and not 0 < split < 1:
        raise UsageError(f"validation_split is {split}; it is a part of the data: 0.2, say.")
    # from torch's generator, so that `torch.manual_seed` decides the shuffling too
    seed = int(torch.empty((), dtype=torch.int64).random_().item()) >> 2
    source = source_of(*data, batch_size=batch_size, shuffle=shuffle, seed=seed)
    held = to_validate_on(validation, validation_batch_size, batch_size)
    if split:
        source, held = _hold_out(source, split, type(data[0]).__name__)
        held = replace(held, batch_size=validation_batch_size or held.batch_size, shuffle=False)
    if class_weight is not None and len(class_weight):
        source = _weighted(source, class_weight)
    return source, held


def to_validate_on(data: Any, own: int | None, batch_size: int | None) -> Source | None:
    """Return the source to validate on; its batch size is `own`, or else that of the training."""
    if data is None:
        return None
    has_batches = kind_of(data) in (Kind.LOADER, Kind.BATCHES)
    if isinstance(data, tuple) or (isinstance(data, list) and not has_batches):
        return source_of(*unpack(data), batch_size=batch_size if own is None else own)
    inherited = None if has_batches else batch_size
    return source_of(data, batch_size=inherited if own is None else own)


def _hold_out(source: Source, part: float, given: str) -> tuple[ArraySource, ArraySource]:
    """Split off the last `part` of the rows for validation."""
    if not isinstance(source, ArraySource):
        raise UsageError(
            f"validation_split cuts arrays and tensors, not a {given}; give what is held out as "
            "validation_data."
        )
    cut = int(source.length * (1 - part))
    if not 0 < cut < source.length:
        raise UsageError(
            f"validation_split={part} of {source.length} examples leaves one side empty."
        )
    return source.split(cut)


def _weighted(source: Source, weights: Mapping[int, float] | Sequence[float]) -> ArraySource:
    """Return the source with each example weighted by its class; the default weight is 1."""
    if not isinstance(source, ArraySource) or not isinstance(source.y, Tensor):
        raise UsageError(
            "class_weight needs y as one array of classes; with other data give sample weights, or "
            "a loss with a weight for each class."
        )
    numbered = weights if isinstance(weights, Mapping) else dict(enumerate(weights))
    classes = _classes(source.y)
    table = torch.ones(max(int(classes.max()), *numbered) + 1)
    for number, value in numbered.items():
        table[number] = float(value)
    chosen = table[classes]
    given = source.weight
    return replace(source, weight=chosen if given is None else chosen * given.reshape(-1))


def _classes(y: Tensor) -> Tensor:
    if y.dim() == 2 and y.shape[1] > 1:
        return y.argmax(1)  # one column for each class
    if y.numel() != len(y) or (y.is_floating_point() and bool((y != y.round()).any())):
        raise UsageError(
            f"class_weight needs a class for each example, not targets of shape {tuple(y.shape)} "
            f"and {y.dtype}; give sample weights instead."
        )
    return y.reshape(-1).long()


def _loader(loader: DataLoader[Any]) -> Source:
    if is_stream(loader):
        return StreamSource(loader, None)
    try:
        return DatasetSource(loader, len(loader))
    except TypeError:  # the sampler has no length
        return DatasetSource(loader, None)


def _check_lengths(lengths: list[int]) -> None:
    if len(set(lengths)) > 1:
        raise UsageError(
            f"the arrays have different lengths ({', '.join(map(str, lengths))}); x, y and "
            "sample_weight need one row for each example."
        )
    if not lengths or lengths[0] == 0:
        raise UsageError("the data is empty: there is no example in it.")


@dataclass
class TensorBatches:
    """Batches of arrays, or of lists of numbers, as batches of tensors."""

    source: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.source:
            apart = type(batch) in (list, tuple)  # x and y, not rows of one array
            yield map_parts(as_tensors, batch) if apart else as_tensors(batch)


def as_tensors(tree: Any) -> Any:
    """Replace arrays and lists of numbers in a tree by tensors."""
    if tree is None or isinstance(tree, Tensor):
        return tree
    if _is_numbers(tree):
        tree = _array(tree)
    if isinstance(tree, dict | list | tuple):
        return map_parts(as_tensors, tree)
    if not isinstance(tree, np.ndarray):
        return torch.as_tensor(tree)
    if not tree.flags.writeable:
        tree = tree.copy()
    tensor = torch.from_numpy(np.ascontiguousarray(tree))
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _array(rows: Any) -> Any:
    try:
        array = np.asarray(rows)
    except ValueError:
        array = None
    if array is None or array.dtype.kind not in "biufc":
        raise UsageError(
            "a list of numbers does not make an array; give every row the same number of values "
            "and no gaps, or use tensors."
        )
    return array


def _is_numbers(tree: Any) -> bool:
    """Return whether `tree` is a nested list of numbers, judged by its first element."""
    if not isinstance(tree, list | tuple):
        return False
    while isinstance(tree, list | tuple) and tree:
        tree = tree[0]
    return isinstance(tree, _NUMBER)


def _is_arrays(x: Any) -> bool:
    """Return whether `x` is one array, or several arrays as the inputs of a model."""
    if isinstance(x, Tensor | np.ndarray) or _is_numbers(x):
        return True
    if isinstance(x, dict):
        return bool(x) and all(map(_is_arrays, x.values()))
    return isinstance(x, list | tuple) and bool(x) and all(map(_is_arrays, x))


def _is_batches(x: Any, y: Any) -> bool:
    """Return whether `x` is a list of batches, (x, y) say, and not of several inputs."""
    if y is not None or not isinstance(x, list):
        return False
    if _is_numbers(x) and not (isinstance(x[0], tuple) and isinstance(x[0][0], list | tuple)):
        return False  # rows of one array
    return all(isinstance(item, list | tuple) for item in x)


def _is_dataset(x: Any) -> bool:
    if isinstance(x, Dataset):
        return True
    ours = isinstance(x, Tensor | np.ndarray | list | tuple | dict | str)
    return hasattr(x, "__getitem__") and hasattr(x, "__len__") and not ours
