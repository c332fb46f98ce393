"""Data as global batches, of which a replica draws its share. What users give becomes one of these
in inputs.py; nobody else asks what it was.

ArraySource      arrays: every replica indexes its own rows; shuffled from one seed
DatasetSource    rows by number, through a DataLoader whose sampler deals out shares
StreamSource     batches one after another: the chief reads, every replica keeps its share

With parameter servers the chief deals batches out, and whoever is free takes one: of arrays only
the number of a batch travels, of datasets the indices of its rows, of streams the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from stratagem.data.loader import ShareLoader, stream
from stratagem.data.passes import PassJournal, dice_of
from stratagem.data.shares import (
    Ordering,
    count_rows,
    draws_at_once,
    map_parts,
    own_rows,
    share,
    tensors_in,
)
from stratagem.errors import UsageError
from stratagem.rules.tickets import Ticket
from stratagem.servers.batch_source import (
    Cut,
    IndexSource,
    parts_of_indices,
    parts_of_rows,
    read,
    say_who_reads,
)
from stratagem.training import fingerprint
from stratagem.training.fingerprint import Look
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica, alone
from stratagem.wire.tree import SIGNED, broadcast_tree

#: arrays up to this size are kept on the GPU for the whole fit
_RESIDENT_BYTES = 1 << 30


@dataclass(slots=True)
class Portion:
    """A replica's share of one global batch; a borrowed row stands in for an empty share."""

    x: Any
    y: Any
    weight: Tensor | None
    examples: int
    total: int


class UnreadPortion(Portion):
    """A share whose rows are read at first use: a standby skips nearly all of them."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Portion]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        found = self._read()
        for each in Portion.__slots__:
            setattr(self, each, getattr(found, each))
        return getattr(found, name)


class Source:
    """Global batches of data."""

    #: batches an epoch, None if unknown
    steps: int | None
    #: whether an epoch goes on where the last one stopped instead of starting anew (a generator)
    once: bool = False
    #: what shuffles, where every process shuffles by itself: all take over the chief's
    seed: int | None = None
    #: whether an epoch is sure to have so many `steps`
    certain: bool = False
    #: whether every process has all rows in memory, and the order of them
    in_memory: ClassVar[bool] = False

    @cached_property
    def journal(self) -> PassJournal:
        """The journal of the present pass, from which another process can continue it."""
        return PassJournal(once=self.once)

    #: whether workers that read get their seed in the first pass only
    seeds_once: bool = False

    def dice(self) -> list[torch.Generator]:
        """Generators that order the data besides torch's own."""
        return []

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        """This replica's shares, in order. Collective where the source needs it."""
        raise NotImplementedError

    def known_input(self) -> Any:
        """An input of the model, of one or more batches; None before a batch is read."""
        return None

    def whole(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        """Whole batches on every replica; the chief reads them. Collective."""
        if not replica.is_chief:
            self.journal.leave()
            while (told := broadcast_tree(replica.collective)) is not None:
                yield Portion(*told)
            return
        for portion in self.portions(_reader(replica), epoch):
            told = [portion.x, portion.y, portion.weight, portion.examples, portion.total]
            broadcast_tree(replica.collective, told)
            yield portion
        broadcast_tree(replica.collective, None)

    def leave(self, ordering: Ordering) -> None:
        """Skip an epoch that was finished before this source was resumed."""
        self.journal.leave()

    def part(self, epoch: int, ticket: Ticket, payload: Any) -> Portion:
        """The rows of a ticket, which came with `payload`."""
        raise NotImplementedError

    def sizes(self, limit: int | None) -> list[tuple[int, int]] | None:
        """Runs of batches of an epoch and how many rows each has; None where `cuts` tell."""
        return None

    def cuts(self) -> Iterator[Cut]:
        """As the chief: batches of an epoch, each to be cut into what travels with its tickets."""
        raise NotImplementedError

    def numbered(self, epoch: int) -> Iterator[Cut]:
        """The batches of an epoch that are left, where every ticket says which epoch it is of."""
        return self.cuts()

    def look(self, label: str) -> Look:
        """The properties that must be the same on every worker."""
        raise NotImplementedError

    def for_followers(self) -> Source:
        """A copy without what only the chief reads."""
        return self

    def agree(self, replica: Replica) -> None:
        """Shuffle as the chief does. Collective."""
        if self.seed is not None:
            self.seed = broadcast_tree(replica.collective, self.seed)

    def check_enough(self, drawn: int, asked: int | None, epoch: int) -> None:
        """An epoch without data, or a generator without enough of it, is no epoch."""
        if drawn and not (self.once and asked is not None and drawn < asked):
            return
        got = f"{drawn or 'none'} of its {asked} batches" if asked is not None else "no batch"
        raise UsageError(
            f"the data ran dry: epoch {epoch + 1} got {got}; give something that can "
            "be iterated again (arrays, a DataLoader, a list of batches), or a generator of "
            "epochs * steps_per_epoch batches together with steps_per_epoch."
        )


@dataclass
class ArraySource(Source):
    """Tensors, or trees of them, indexed in place."""

    in_memory: ClassVar[bool] = True
    x: Any
    y: Any
    weight: Tensor | None
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    length: int = field(init=False)
    steps: int = field(init=False)
    #: the epoch whose order was drawn last for a ticket, and that order
    _drawn: tuple[int, Tensor | None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.certain = True
        self.length = count_rows(self.x)
        self.steps = -(-self.length // self.batch_size)

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        data, order = [self.x, self.y, self.weight], self._order(epoch)
        small = sum(t.nbytes for t in tensors_in(data)) <= _RESIDENT_BYTES
        if replica.device.type == "cuda" and small:
            data, order = to_device([data, order], replica.device)
        first = self.journal.skip()
        self.journal.then()
        for batch in range(first, self.steps):
            cut = partial(self._cut, data, order, batch, replica.index, replica.count)
            yield cut() if replica.collective.live else UnreadPortion(cut)

    def known_input(self) -> Any:
        return self.x

    def whole(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        return self.portions(_reader(replica), epoch)

    def part(self, epoch: int, ticket: Ticket, payload: Any) -> Portion:
        epoch = epoch if payload is None else payload["epoch"]
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._order(epoch))
        data = [self.x, self.y, self.weight]
        return self._cut(data, self._drawn[1], ticket.batch, ticket.part, ticket.parts)

    def _cut(
        self, data: list[Any], order: Tensor | None, batch: int, part: int, parts: int
    ) -> Portion:
        begin = batch * self.batch_size
        total = min(self.batch_size, self.length - begin)
        start, end = share(total, parts, part)
        window = slice(begin + start, begin + end) if end > start else slice(begin, begin + 1)
        chosen: Any = window if order is None else order[window]
        x, y, weight = (rows_at(each, chosen) for each in data)
        return Portion(x, y, weight, end - start, total)

    def _order(self, epoch: int) -> Tensor | None:
        """The same permutation whatever the number of replicas."""
        if not self.shuffle:
            return None
        dice = torch.Generator().manual_seed((self.seed + 7919 * epoch) % 2**63)
        return torch.randperm(self.length, generator=dice)

    def sizes(self, limit: int | None) -> list[tuple[int, int]]:
        steps = self.steps if limit is None else min(limit, self.steps)
        last = min(self.batch_size, self.length - (steps - 1) * self.batch_size)
        return [(steps - 1, self.batch_size), (1, last)] if steps > 1 else [(1, last)]

    def numbered(self, epoch: int) -> Iterator[Cut]:
        first = self.journal.skip()
        self.journal.then()
        rows = [size for count, size in self.sizes(None) for _ in range(count)]
        return (partial(_of_epoch, epoch, total) for total in rows[first:])

    def split(self, at: int) -> tuple[ArraySource, ArraySource]:
        """The rows before `at`, and the others."""
        data = {"x": self.x, "y": self.y, "weight": self.weight}
        first = {name: rows_at(part, slice(at)) for name, part in data.items()}
        last = {name: rows_at(part, slice(at, None)) for name, part in data.items()}
        return replace(self, **first), replace(self, **last)

    def look(self, label: str) -> Look:
        arrays = {"x": self.x, "y": self.y, "sample_weight": self.weight}
        parts = {name: part for name, part in arrays.items() if part is not None}
        found: Look = {
            f"kind of {label}": f"arrays ({', '.join(parts)})",
            f"number of rows in {label}": str(self.length),
            f"batch_size for {label}": str(self.batch_size),
            f"shuffle for {label}": str(self.shuffle),
        }
        for name, part in parts.items():
            found |= fingerprint.of_arrays(part, f"{name} of {label}")
        return found


class DatasetSource(Source):
    """A DataLoader of a dataset with numbered rows; its own sampler decides the order."""

    def __init__(self, loader: DataLoader[Any], steps: int | None) -> None:
        self.loader, self.steps = loader, steps
        self.certain = steps is not None and draws_at_once(loader.batch_sampler)
        self.seeds_once = loader.persistent_workers
        self._indices: IndexSource | None = None

    def dice(self) -> list[torch.Generator]:
        return dice_of(self.loader)

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        sizes: list[tuple[int, int]] = []
        shares = ShareLoader(
            self.loader,
            replica.collective,
            lambda mine, total: sizes.append((mine, total)),
            ordering=replica.ordering,
            journal=self.journal,
        )
        for batch in shares:
            yield portion_of(batch, *sizes.pop())

    def part(self, epoch: int, ticket: Ticket, payload: Any) -> Portion:
        chosen = payload["indices"]
        return portion_of(read(self.loader, chosen), len(chosen), payload["total"])

    def cuts(self) -> Iterator[Cut]:
        if self._indices is None:
            say_who_reads(self.loader)
            self._indices = IndexSource(self.loader, self.journal)
        return map(parts_of_indices, self._indices)

    def look(self, label: str) -> Look:
        return fingerprint.of_loader(self.loader, label)


@dataclass
class StreamSource(Source):
    """Whole batches from an iterable that only the chief reads."""

    batches: Iterable[Any]
    steps: int | None
    once: bool = False

    def dice(self) -> list[torch.Generator]:
        return dice_of(self.batches) if isinstance(self.batches, DataLoader) else []

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        for batch in stream(self.batches, replica.collective, replica.ordering, self.journal):
            yield portion_of(*own_rows(batch, replica.count, replica.index))

    def leave(self, ordering: Ordering) -> None:
        if self.once:  # what is left of it comes in the next epoch
            with ordering():
                self.journal.begin([])
                for _ in islice(self.batches, self.journal.skip()):
                    pass
        self.journal.leave()

    def part(self, epoch: int, ticket: Ticket, payload: Any) -> Portion:
        batch = payload["rows"]
        return portion_of(batch, count_rows(batch), payload["total"])

    def cuts(self) -> Iterator[Cut]:
        self.journal.begin(self.dice())
        return map(parts_of_rows, self.journal.rest(iter(self.batches)))

    def look(self, label: str) -> Look:
        return fingerprint.of_stream(label)

    def for_followers(self) -> Source:
        return replace(self, batches=())


def _reader(replica: Replica) -> Replica:
    """A replica that reads whole batches, in the chief's order."""
    reader = alone(replica)
    reader.streams = replica.streams
    return reader


def _of_epoch(epoch: int, total: int, parts: int) -> list[dict[str, Any]]:
    return [{"epoch": epoch}] * min(parts, total)


def portion_of(batch: Any, examples: int, total: int) -> Portion:
    """A batch as a portion of `examples` rows, of the `total` that all parts have."""
    return Portion(*unpack(batch), examples, total)


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


def rows_at(tree: Any, chosen: slice | Tensor) -> Any:
    """The chosen rows of every tensor in a tree."""
    if tree is None:  # on the hot path, mostly instead of weights
        return None
    if not isinstance(tree, Tensor):
        return map_parts(lambda part: rows_at(part, chosen), tree)
    if type(chosen) is slice:
        return tree[chosen]
    if tree.dtype in SIGNED:
        return tree.view(SIGNED[tree.dtype]).index_select(0, chosen).view(tree.dtype)
    return tree.index_select(0, chosen)
