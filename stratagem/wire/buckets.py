"""Flat buckets of gradients, in the order in which backward makes them.

    bucket 0  [ last layer ........ ]   full first, travels first
    bucket 1  [ middle layers ..... ]
    bucket 2  [ first layer | notes ]   the notes ride at the end of the last bucket

The notes are a few numbers of this step that are summed with the gradients: the loss, its number of
examples, and which parameters had a gradient at all. They would otherwise cost a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]

#: a capacity that puts all gradients into one bucket
WHOLE = 1 << 62
#: bytes of the first bucket: small, so that the link is busy early in backward
_FIRST = 1 << 20


@dataclass
class Bucket:
    """A flat piece of storage, and the indices of its parameters."""

    flat: Tensor
    members: list[int]
    missing: int = 0


class Buckets:
    """Flat storage for the gradients of `params`, with a view for each gradient."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        allocate: Allocate,
        *,
        capacity: int,
        notes: int,
        notes_apart: Allocate | None = None,
        may_be_kept: bool = False,
    ) -> None:
        """`may_be_kept`: a `p.grad` that the user keeps becomes a copy before the next write."""
        self.params = list(params)
        self.notes_size = notes + len(self.params)
        plan = plan_buckets(self.params, capacity)
        self.views: list[Tensor] = [torch.empty(0)] * len(self.params)
        #: in custom loops, a weak reference to the last `p.grad` of each parameter
        self._given: list[TensorWeakRef | None] | None = None
        if may_be_kept:
            self._given = [None] * len(self.params)
        self.buckets: list[Bucket] = []
        exact = any(p.dtype is torch.float64 for p in self.params)
        kind = torch.float64 if exact else torch.float32
        ride = notes_apart is None and self.params[plan[-1][0]].dtype is kind
        for number, members in enumerate(plan):
            tail = self.notes_size if ride and number == len(plan) - 1 else 0
            self.buckets.append(self._lay_out(members, tail, allocate))
        if ride:
            self.tail = self.buckets[-1].flat[-self.notes_size :]
            self.apart: Tensor | None = None
        else:
            device = self.params[0].device
            self.apart = self.tail = (notes_apart or allocate)(self.notes_size, kind, device)
        self.notes, self.used = self.tail[:notes], self.tail[notes:]
        self._where = {i: b for b in self.buckets for i in b.members}

    def _lay_out(self, members: list[int], tail: int, allocate: Allocate) -> Bucket:
        first = self.params[members[0]]
        total = sum(self.params[i].numel() for i in members)
        flat = allocate(total + tail, first.dtype, first.device)
        at = 0
        for i in members:
            param = self.params[i]
            self.views[i] = flat[at : at + param.numel()].view(param.shape)
            at += param.numel()
        return Bucket(flat, members)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients, but not the notes."""
        for bucket in self.buckets:
            bucket.flat[: self.length(bucket)].mul_(factor)

    def length(self, bucket: Bucket) -> int:
        """Return how many numbers of a bucket are gradients."""
        return sum(self.params[i].numel() for i in bucket.members)

    def begin(self) -> None:
        """Begin a backward pass: all gradients of every bucket are missing."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
        self._next = 0

    def take(self, index: int, param: nn.Parameter) -> None:
        """Copy a finished gradient into its bucket and make `p.grad` a view of it."""
        view = self.views[index]
        grad = param.grad
        assert grad is not None
        if grad.data_ptr() != view.data_ptr():
            self.spare(index)
            view.copy_(grad)
            param.grad = self.gradient(index)
        self._where[index].missing -= 1

    def gradient(self, index: int) -> Tensor:
        """Return the tensor for a parameter's `grad`, which shares the bucket's memory."""
        if self._given is None:
            return self.views[index]
        given = self.views[index].detach()
        self._given[index] = TensorWeakRef(given)
        return given

    def spare(self, index: int) -> None:
        """Give the last gradient, if the user kept it, its own memory before the next write.

        On one device the next gradient is another tensor, and the last one keeps its values.
        """
        last = None if self._given is None else self._given[index]
        kept = None if last is None else last()
        if kept is not None:
            kept.data = kept.detach().clone()

    def full(self) -> list[Bucket]:
        """Return the buckets that may be reduced now, in the same order on every replica.

        The last one waits for `rest`: its notes are known only after backward.
        """
        last = self.buckets[-1]
        return self._release(lambda bucket: bucket.missing == 0 and bucket is not last)

    def rest(self) -> list[Bucket]:
        """Return the remaining buckets."""
        return self._release(lambda bucket: True)

    def _release(self, may_go: Callable[[Bucket], bool]) -> list[Bucket]:
        start = self._next
        while self._next < len(self.buckets) and may_go(self.buckets[self._next]):
            self._next += 1
        return self.buckets[start : self._next]


def plan_buckets(params: Sequence[nn.Parameter], capacity: int) -> list[list[int]]:
    """Assign parameters to buckets: in reverse order, by type, a new bucket when one is full.

    The first bucket closes early, or it could wait for the bias of a layer whose weights do not
    fit.
    """
    plan: list[list[int]] = []
    first = WHOLE if capacity == WHOLE else min(_FIRST, capacity)
    order = list(reversed(range(len(params))))
    for dtype in dict.fromkeys(params[i].dtype for i in order):
        room = -1
        for i in order:
            if params[i].dtype is not dtype:
                continue
            size = params[i].numel() * dtype.itemsize
            if size > room:
                plan.append([])
                room = max(capacity, size)
            plan[-1].append(i)
            room -= size
            if len(plan) == 1 and capacity - room >= first:
                room = -1
    return plan
