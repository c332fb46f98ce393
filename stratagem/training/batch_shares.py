"""Which batch a loss is of, where a loop has several in hand.

    for x, y in loader: ...                              the latest one: nothing is looked at
    window = [next(batches) for _ in range(3)]           a batch is fetched while another is unused:
    for x, y in window: loss_fn(model(x), y).backward()  from then on forward hooks look

The tensors of a batch carry its share. Forward finds it by them, puts it in force and marks its
output, by which backward finds it again. Other tensors (x.float()) may be of any unused batch: if
these differ in size, their loss is refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import version_of
from stratagem.training.batch_marks import Batch, Marks, Size, carriers
from stratagem.training.gathered_rows import Found, Places, ReadRows
from stratagem.training.loss_reading import SEVERAL
from stratagem.training.replica import Replica, Share
from stratagem.training.row_passes import RowPasses

#: the source of batches that `strategy.rows` cuts
ROWS = "rows"
_MARK = "stratagem share"


class _Graph:
    """Lies at the output of a forward pass, as long as the graph of a loss leads there."""

    def __init__(self, size: Size | None) -> None:
        self.size = size


class BatchShares:
    """The batches that a replica's loop has in hand; puts the share of one in force."""

    def __init__(self, share: Share, count: int) -> None:
        self._share, self._count = share, count
        #: the batch that was fetched last; None once its loader has ended
        self.latest: Batch | None = None
        #: set while a backward pass runs, which may compute outputs again
        self.in_backward = False
        self._marks = Marks()
        self._unused: weakref.WeakSet[Batch] = weakref.WeakSet()
        #: batches that nothing can carry: of texts
        self._texts: list[Batch] = []
        self.fetches = self._fetched_by_backward = 0
        self._models: list[weakref.ref[nn.Module]] = []
        self._handles: list[Any] = []
        #: of the forward pass under way: None if it may be of several sizes
        self._size: Size | None = None
        self._continues = False
        self._graphs: dict[Size | None, weakref.WeakSet[_Graph]] = {}
        #: batches whose forward pass may have come before the hooks
        self._unseen: set[Size] = set()
        #: the backward passes over the latest rows of `strategy.rows`
        self._passes: RowPasses | None = None
        #: False for a loss that may be of a batch that the loop kept, before forward was looked at
        self.is_sure = True
        #: how many tensors carry the latest batch
        self._carried = 0
        #: of the latest forward pass since a batch was fetched, or a loader has ended
        self._current: Size | None = None
        #: what was read of each loader, as long as its pass lasts; what was borrowed of those that
        #: have ended, by the rows that came here
        self._readings: dict[object, ReadRows] = {}
        self._read: dict[int, list[Places]] = {}

    def watch(self, model: nn.Module) -> None:
        """Look at the forward passes of a model as soon as two batches are in hand."""
        self._models = [each for each in self._models if each() not in (None, model)]
        self._models.append(weakref.ref(model))
        if self._handles:
            self._hook(model)

    def fetched(self, tree: Any, source: object) -> None:
        """Have a batch that was fetched carry the share in force."""
        if (self._unused or source is ROWS) and not self._handles:
            self._unseen = {each.size for each in self._unused}
            self._look()
        self.fetches += 1
        size = Size(self._share.examples, self._share.total, part=self._share.part)
        batch = self.latest = Batch(size, source, self.fetches, bool(self._handles))
        self._current = None
        if source is not ROWS:
            reading = self._readings.setdefault(source, ReadRows())
            reading.add(size.examples, size.total, self._count)
        self._carried = self._marks.put(tree, batch)
        if not self._carried:
            self._texts.append(batch)
        self._unused.add(batch)
        self._passes = RowPasses(tree) if source is ROWS else None

    def end(self, source: object, count: int) -> None:
        """End a pass over a loader: the body of a loop has run over its last batch, unless that is
        one of a window, or of `count` that are trained on, and no backward pass came since."""
        self._current = None
        if (reading := self._readings.pop(source, None)) is not None:
            known = self._read.setdefault(reading.rows, [])
            if reading.borrowed not in known:
                known.append(reading.borrowed)
        left = [each for each in self._unused if each.source is source]
        late, trained = False, self._fetched_by_backward
        if len(left) == 1 and (not count or not left[0].watched):
            self._use(left)
            late = trained < left[0].number and (count == 1 or trained > self.fetches - count)
        if late and not self._handles:
            self._look()
        elif not late and not self._unused:
            for handle in self._handles:
                handle.remove()
            self._handles, self._unseen = [], set()

    def rows_of(self, tensor: Tensor, axis: int) -> Found:
        """Return what is known of the rows of a tensor that is to be gathered."""
        batch = self._marks.of(tensor)
        sizes: set[Size] = set() if batch is None else {batch.size}
        if not sizes and tensor.grad_fn is not None:
            sizes = {size for size in _below([tensor])[0] if size is not None}
        if len(sizes) == 1:
            return Found(_borrows(sizes.pop()))
        rows = tensor.shape[axis]
        sizes = {self._current} if self._current is not None else self._in_hand()
        whole = [[row, row] for row in range(rows)]
        perhaps = [whole if _borrows(size) else [] for size in sizes if size.rows == rows]
        if perhaps and self._current is None and self.latest is None:  # of a loop that is over?
            perhaps.append([])
        if not perhaps:
            under_way = (each for each in self._readings.values() if each.rows == rows)
            perhaps = [*self._read.get(rows, []), *(each.borrowed for each in under_way)]
        if not perhaps and any(map(_borrows, sizes)):  # several values for each row
            perhaps = [whole if _borrows(size) else [] for size in sizes]
        known: list[Places] = []
        known += (each for each in perhaps if each not in known)
        return Found(None, known)

    def find(self, losses: Sequence[Tensor]) -> bool:
        """Put the share of these losses' batch in force; return whether they carry it."""
        self.is_sure = True
        if not self._handles and not any(map(len, self._graphs.values())):
            self._graphs = {}
            if len(self._marks) > self._carried and self._marks.others(
                self.latest
            ):  # the loop keeps batches
                self.is_sure = False
                self._look()
            return False
        sizes = [size for size, graphs in self._graphs.items() if graphs]
        if len(sizes) > 1 or self._unseen.difference(sizes):
            sizes, bare = _below(losses)
            if len(sizes) == 1 and bare:  # a penalty on weights, or a pass before the hooks
                sizes += self._unseen.difference(sizes)
            if len(sizes) > 1 and None not in sizes:
                raise NotDistributable(
                    "call backward() for each batch, whose gradients add up: this loss is of "
                    f"batches of different sizes ({_list(sizes)}), whose shares do not weigh alike."
                )
        size = sizes[0] if sizes else self._guess()
        if size is None or None in sizes:
            raise NotDistributable(SEVERAL)
        self._force(size)
        return bool(sizes)

    def part_of_latest(self) -> float:
        """With servers: what a loss is multiplied by, since a push weighs as its latest batch."""
        part, latest = self._share.part, self.latest
        if latest is None or part == latest.size.part:
            return 1.0
        if not latest.size.part:
            raise NotDistributable(
                "fetch each batch when its turn comes, or give the loader drop_last=True: several "
                "batches are in hand, and this worker has none of the rows of the latest one, by "
                "which its gradients weigh at the servers."
            )
        return part / latest.size.part

    def refuse_single_rows(self) -> None:
        """Refuse a backward pass for each of the rows that `strategy.rows` has returned."""
        share = self._share
        if self._passes is not None and 0 < share.examples < share.total:
            models = [model for found in self._models if (model := found()) is not None]
            self._passes.begin(share.examples, models)

    @property
    def rows(self) -> int | None:
        """The rows of the batch in force; None if no batch was cut."""
        return max(self._share.examples, 1) if self._share.announced else None

    def version(self) -> int | None:
        """A number that changes when weights are updated."""
        models = (model for found in self._models if (model := found()) is not None)
        trained = (p for model in models for p in model.parameters() if p.requires_grad)
        return version_of(param) if (param := next(trained, None)) is not None else None

    def backward_over(self) -> None:
        """Note the end of a backward pass."""
        self._fetched_by_backward = self.fetches
        self._unseen = set()
        if not self._handles:
            self._unused.clear()
            self._texts.clear()

    def _look(self) -> None:
        """Look at forward passes from now on."""
        for model in self._models:
            if (found := model()) is not None:
                self._hook(found)

    def _hook(self, model: nn.Module) -> None:
        parts: Iterable[nn.Module] = (model,)
        if isinstance(model, nn.ModuleList | nn.ModuleDict):  # it is never called itself
            parts = model.children()
        for part in parts:
            enter, leave = _Hook(self._enter), _Hook(self._leave)
            self._handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(part.register_forward_hook(leave))

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.in_backward:
            return
        leaves = carriers((args, kwargs))
        batches = {batch for leaf in leaves if (batch := self._marks.of(leaf)) is not None}
        self._continues = not batches and any(_has_graph(leaf) for leaf in leaves)
        if self._continues:
            return
        if self._passes is not None:
            self._passes.enter(leaves, whole=bool(batches))
        sizes = {each.size for each in batches}
        self._unseen -= sizes
        self._size = self._guess(leaves) if not sizes else sizes.pop() if len(sizes) == 1 else None
        if self._size is not None:
            self._force(self._size)
        self._current = self._size
        self._use(batches or self._candidates())

    def _leave(self, _: nn.Module, args: Any, output: Any) -> None:
        if self.in_backward or self._continues:
            return
        nodes = [leaf.grad_fn for leaf in carriers(output) if _has_graph(leaf)]
        graph = _Graph(self._size)
        for node in nodes:
            node.metadata[_MARK] = graph
        if nodes:
            self._graphs.setdefault(self._size, weakref.WeakSet()).add(graph)

    def _in_hand(self) -> set[Size]:
        """The sizes of the batches that something without a mark may be of."""
        latest = [self.latest] if self.latest is not None else []
        return {each.size for each in [*self._candidates(), *latest]}

    def _candidates(self) -> list[Batch]:
        """The batches that tensors without a mark may be of."""
        last, since = self.latest, self._fetched_by_backward
        return [
            each
            for each in self._unused
            if last is None or each.source is last.source or (each.watched and each.number > since)
        ]

    def _guess(self, leaves: Sequence[Any] = ()) -> Size | None:
        """The size of the batch that tensors without a mark are of; None if it may be several."""
        share = self._share
        if (
            leaves and self.latest is not None and self._marks.others(self.latest)
        ):  # are they of the latest one?
            lengths = {len(each) for each in leaves if isinstance(each, Tensor) and each.dim()}
            if self.latest.size.rows not in lengths:
                return None
        sizes = self._in_hand()
        if not sizes:
            return Size(share.examples, share.total, share.announced, share.part)
        return sizes.pop() if len(sizes) == 1 else None

    def _use(self, batches: Iterable[Batch]) -> None:
        self._texts.clear()
        for each in list(batches):
            self._unused.discard(each)

    def _force(self, size: Size) -> None:
        self._share.set(size.examples, size.total)
        self._share.announced, self._share.part = size.announced, size.part


class _Hook:
    """A hook that does nothing in a copy or a file of the model."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling() and (method := self._method()) is not None:
            method(*args)

    def __reduce__(self) -> Any:  # plain Python's, so that a file loads without stratagem
        return partial, (sys.audit, "forward")


def shares_of(replica: Replica) -> BatchShares:
    """Return the batches that a replica's loop has in hand."""
    if replica.loop.batches is None:
        replica.loop.batches = BatchShares(replica.share, replica.count)
    found: BatchShares = replica.loop.batches
    return found


def _borrows(size: Size) -> bool:
    return not size.examples


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


def _below(losses: Sequence[Tensor]) -> tuple[list[Size | None], bool]:
    """The sizes of the batches that losses are of, and whether a weight is reached besides."""
    todo: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    sizes: dict[Size | None, None] = {}
    seen, bare = set(todo), False
    while todo:
        node = todo.pop()
        if (mark := node.metadata.get(_MARK)) is not None:
            sizes[mark.size] = None
            continue
        bare |= hasattr(node, "variable")
        below = {each for each, _ in node.next_functions if each is not None} - seen
        todo += below
        seen |= below
    return list(sizes), bare


def _list(sizes: Iterable[Size | None]) -> str:
    return ", ".join(str(each) for each in sizes)
