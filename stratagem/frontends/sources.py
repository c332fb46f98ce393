"""Sources of data: global batches, of which each replica draws its share.

inputs.py turns what users give into one of these:

ArraySource      arrays: every replica indexes its own rows, shuffled by a common seed
DatasetSource    numbered rows, read by a DataLoader whose sampler gives each replica its share
StreamSource     an iterable of batches: the chief reads, every replica keeps its share

With parameter servers, the chief deals batches as tickets and each free worker takes one. A ticket
carries the number of a batch for arrays, its row indices for datasets, its rows for streams.
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
    """A replica's share of one global batch; an empty share has one row that is not counted."""

    x: Any
    y: Any
    weight: Tensor | None
    examples: int
    total: int


class UnreadPortion(Portion):
    """A share whose rows are read at first use, since a standby skips almost all shares."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Portion]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        found = self._read()
        for each in Portion.__slots__:
            setattr(self, each, getattr(found, each))
        return getattr(found, name)


class Source:
    """A source of global batches."""

    #: batches per epoch; None if unknown
    steps: int | None
    #: whether an epoch continues where the last one stopped (a generator) instead of starting over
    once: bool = False
    #: the shuffling seed where every process shuffles by itself; all use the chief's
    seed: int | None = None
    #: whether every epoch has exactly `steps` batches
    certain: bool = False
    #: whether every process has all rows and their order in memory
    in_memory: ClassVar[bool] = False

    @cached_property
    def journal(self) -> PassJournal:
        """The journal of the present pass, from which another process can continue it."""
        return PassJournal(once=self.once)

    #: whether DataLoader workers are seeded in the first pass only
    seeds_once: bool = False

    def dice(self) -> list[torch.Generator]:
        """Return the generators that order the data, besides torch's default one."""
        return []

    def portions(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        """Yield this replica's shares, in order. Collective for some sources."""
        raise NotImplementedError

    def known_input(self) -> Any:
        """Return an input of the model; None if no batch has been read."""
        return None

    def whole(self, replica: Replica, epoch: int) -> Iterator[Portion]:
        """Yield whole batches on every replica; the chief reads them. Collective."""
        if not replica.is_chief:
            self.journal.leave()
            while (message := broadcast_tree(replica.collective)) is not None:
                yield Portion(*message)
            return
        for portion in self.portions(_reader(replica), epoch):
            message = [portion.x, portion.y, portion.weight, portion.examples, portion.total]
            broadcast_tree(replica.collective, message)
            yield portion
        broadcast_tree(replica.collective, None)

    def leave(self, ordering: Ordering) -> None:
        """Skip an epoch that had finished before training was resumed."""
        self.journal.leave()

    def part(self, epoch: int, ticket: Ticket, payload: Any) -> Portion:
        """Return the rows of a ticket and its `payload`."""
        raise NotImplementedError

    def sizes(self, limit: int | None) -> list[tuple[int, int]] | None:
        """Return an epoch's (batches, rows per batch) in order; None if `cuts` must be read."""
        return None

    def cuts(self) -> Iterator[Cut]:
        """As the chief: return an epoch's batches, as functions that make the tickets' payloads."""
        raise NotImplementedError

    def numbered(self, epoch: int) -> Iterator[Cut]:
        """Return an epoch's remaining batches, whose tickets carry the epoch's number."""
        return self.cuts()

    def look(self, label: str) -> Look:
        """Return the properties that must be equal on every worker."""
        raise NotImplementedError

    def for_followers(self) -> Source:
        """Return a copy without the data that only the chief reads."""
        return self

    def agree(self, replica: Replica) -> None:
        """Shuffle as the chief does. Collective."""
        if self.seed is not None:
            self.seed = broadcast_tree(replica.collective, self.seed)

    def check_enough(self, drawn: int, asked: int | None, epoch: int) -> None:
        """Raise if an epoch got no batch, or a generator ended early."""
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
    """Tensors, or trees of tensors, indexed in place."""

    in_memory: ClassVar[bool] = True
    x: Any
    y: Any
    weight: Tensor | None
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    length: int = field(init=False)
    steps: int = field(init=False)
    #: the last epoch that a ticket was of, and its order
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
        """Return the order of the rows, which does not depend on the number of replicas."""
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
        """Split into the rows before `at` and the rows from `at` on."""
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
        if self.once:  # the next epoch continues the same iterator
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
    """Return a replica of one, which reads whole batches in the chief's order."""
    reader = alone(replica)
    reader.streams = replica.streams
    return reader


def _of_epoch(epoch: int, total: int, parts: int) -> list[dict[str, Any]]:
    return [{"epoch": epoch}] * min(parts, total)


def portion_of(batch: Any, examples: int, total: int) -> Portion:
    """Return a batch as the portion of `examples` rows of a global batch of `total` rows."""
    return Portion(*unpack(batch), examples, total)


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Return (x, y, sample weight) of a batch, with None for missing parts."""
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
    """Return the chosen rows of every tensor in a tree."""
    if tree is None:  # the usual sample weights, on the hot path
        return None
    if not isinstance(tree, Tensor):
        return map_parts(lambda part: rows_at(part, chosen), tree)
    if type(chosen) is slice:
        return tree[chosen]
    if tree.dtype in SIGNED:
        return tree.view(SIGNED[tree.dtype]).index_select(0, chosen).view(tree.dtype)
    return tree.index_select(0, chosen)
