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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.data.loader import LoaderWrapper
from stratagem.errors import NotDistributable
from stratagem.training.replica import Replica, Share
from stratagem.training.row_passes import RowPasses

#: the source of batches that `strategy.rows` cuts
ROWS = "rows"
_MARK = "stratagem share"


class Size(NamedTuple):
    """The size of a share; the shares of two batches of one size are alike."""

    examples: int
    total: int
    announced: bool = True
    #: with servers: the part of the batch that this worker was dealt
    part: float = 1.0

    def __str__(self) -> str:
        return f"{self.examples} of {self.total} rows"


class Batch:
    """A batch that was fetched; exists as long as one of its tensors."""

    def __init__(self, size: Size, source: object, number: int, watched: bool) -> None:
        self.size, self.source, self.number = size, source, number
        #: whether forward was looked at since it was fetched
        self.watched = watched


class _Graph:
    """Lies at the output of a forward pass, as long as the graph of a loss leads there."""

    def __init__(self, size: Size | None) -> None:
        self.size = size


class BatchShares:
    """The batches that a replica's loop has in hand; puts the share of one in force."""

    def __init__(self, share: Share) -> None:
        self._share = share
        #: the batch that was fetched last; None once its loader has ended
        self.latest: Batch | None = None
        #: set while a backward pass runs, which may compute outputs again
        self.in_backward = False
        self._marks: dict[int, tuple[weakref.ref[Any], Batch]] = {}
        self._unused: weakref.WeakSet[Batch] = weakref.WeakSet()
        #: batches that nothing can carry: of texts
        self._texts: list[Batch] = []
        self._fetched = self._fetched_by_backward = 0
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
        self._fetched += 1
        size = Size(self._share.examples, self._share.total, part=self._share.part)
        batch = self.latest = Batch(size, source, self._fetched, bool(self._handles))
        leaves, marks = _carriers(tree), self._marks
        for leaf in leaves:
            at = id(leaf)
            marks[at] = weakref.ref(leaf, partial(_forget, marks, at)), batch
        if not leaves:
            self._texts.append(batch)
        self._unused.add(batch)
        self._passes = RowPasses(tree) if source is ROWS else None

    def size_of(self, leaf: object) -> Size | None:
        """Return the share that a tensor of a batch carries."""
        mark = self._marks.get(id(leaf))
        return mark[1].size if mark and mark[0]() is leaf else None

    def end(self, source: object, count: int) -> None:
        """End a pass over a loader: the body of a loop has run over its last batch, unless it is
        one of `count` that are trained on, and there was no backward pass since it was fetched."""
        left = [each for each in self._unused if each.source is source]
        late, trained = False, self._fetched_by_backward
        if len(left) == 1:
            self._use(left)
            late = trained < left[0].number and (count == 1 or trained > self._fetched - count)
        if late and not self._handles:
            self._look()
        elif not late and not self._unused:
            for handle in self._handles:
                handle.remove()
            self._handles, self._unseen = [], set()

    def find(self, losses: Sequence[Tensor]) -> None:
        """Put the share of these losses' batch in force."""
        if not self._handles and not any(map(len, self._graphs.values())):
            self._graphs = {}
            return
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
            raise NotDistributable(
                "fetch each batch when its turn comes, give the model the very tensors that the "
                "loader yields, or give the loader drop_last=True: several batches of different "
                "sizes are in hand, and it cannot be told of which of them this loss is."
            )
        self._force(size)

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

    def backward_over(self) -> None:
        """Note the end of a backward pass."""
        self._fetched_by_backward = self._fetched
        self._unseen = set()
        if not self._handles:
            self._unused.clear()
            self._texts.clear()

    def _look(self) -> None:
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
        leaves = _carriers((args, kwargs))
        marks = [self._marks.get(id(leaf)) for leaf in leaves]
        batches = {m[1] for m, leaf in zip(marks, leaves, strict=True) if m and m[0]() is leaf}
        self._continues = not batches and any(_has_graph(leaf) for leaf in leaves)
        if self._continues:
            return
        if self._passes is not None:
            self._passes.enter(leaves, whole=bool(batches))
        sizes = {each.size for each in batches}
        self._unseen -= sizes
        self._size = self._guess() if not sizes else sizes.pop() if len(sizes) == 1 else None
        if self._size is not None:
            self._force(self._size)
        self._use(batches or self._candidates())

    def _leave(self, _: nn.Module, args: Any, output: Any) -> None:
        if self.in_backward or self._continues:
            return
        nodes = [leaf.grad_fn for leaf in _carriers(output) if _has_graph(leaf)]
        graph = _Graph(self._size)
        for node in nodes:
            node.metadata[_MARK] = graph
        if nodes:
            self._graphs.setdefault(self._size, weakref.WeakSet()).add(graph)

    def _candidates(self) -> list[Batch]:
        """The batches that tensors without a mark may be of."""
        last, since = self.latest, self._fetched_by_backward
        return [
            each
            for each in self._unused
            if last is None or each.source is last.source or (each.watched and each.number > since)
        ]

    def _guess(self) -> Size | None:
        """The size of the batch that tensors without a mark are of; None if it may be several."""
        share = self._share
        sizes = {each.size for each in self._candidates()}
        if self.latest is not None:
            sizes.add(self.latest.size)
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
        replica.loop.batches = BatchShares(replica.share)
    found: BatchShares = replica.loop.batches
    return found


class CarryingLoader(LoaderWrapper):
    """Has each batch carry its share, for loops that fetch several before they train on one."""

    def __init__(self, loader: Any, replica: Replica, *, nested: bool) -> None:
        super().__init__(loader)
        self._replica, self._nested = replica, nested

    def __iter__(self) -> Any:
        batches, this_pass = shares_of(self._replica), object()
        share, count, uneven, number = self._replica.share, self._replica.count, False, 0
        before = batches.latest if self._nested else None
        try:
            for batch in self.loader:
                batches.fetched(batch, this_pass)
                number += 1
                uneven = uneven or share.total % count > 0
                yield batch
            batches.latest, self._replica.loop.uneven = before, uneven
        finally:
            batches.latest = before or batches.latest
            batches.end(this_pass, 0 if self._nested else number)


def _forget(marks: dict[int, Any], at: int, gone: weakref.ref[Any]) -> None:
    if at in marks and marks[at][0] is gone:
        del marks[at]


def _carriers(tree: Any) -> list[Any]:
    """The tensors in a tree, and objects of classes that are not known here."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return [] if type(tree).__weakrefoffset__ == 0 or isinstance(tree, type) else [tree]
    return [leaf for part in tree for leaf in _carriers(part)]


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
